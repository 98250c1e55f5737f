# SPDX-License-Identifier: Apache-2.0
"""The flight recorder: what the agent has written into the maps, when, and because of what.

history_records  what stands in the files
segments         the files: bounded, whole up to a crash, and set aside if they are not ours
recorder         the agent's part: collects causes and writes, and appends a record for each sync
sound_records    which records an agent can have written
past             what the maps held at a time
changes          what each record changed, in words
"""
