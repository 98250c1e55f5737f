# SPDX-License-Identifier: Apache-2.0
"""The flight recorder: what the agent wrote into the maps, when, and why.

segments         the files: bounded, and complete up to a crash
recorder         the agent's part: collects causes and writes, and appends a record for each sync
past             the content of the maps at a time
changes          the change by each record, in words
"""
