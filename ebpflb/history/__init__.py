# SPDX-License-Identifier: Apache-2.0
"""How each sync changed Services in the maps, and the causes.

records    the file: a line of JSON for each sync, written by the agent, read by commands
"""
