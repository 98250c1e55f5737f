# SPDX-License-Identifier: Apache-2.0
"""How each sync changed Services in the maps, and the causes.

records          the file: a line of JSON for each sync, read and written
recorder         the agent's part: collects causes, and compares Services before and after a sync
"""
