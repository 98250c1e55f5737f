# SPDX-License-Identifier: Apache-2.0
"""What each sync changed of the Services in the maps, and because of what.

records          the file: a line of JSON for each sync, read and written
recorder         the agent's part: collects causes, and compares Services before and after a sync
"""
