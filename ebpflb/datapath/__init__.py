# SPDX-License-Identifier: Apache-2.0
"""The maps and programs in the kernel.

The agent uses all of it through datapath.Datapath: it loads and attaches the programs, and writes
plans to the maps; an EndpointSlice's slots are written there, by ``apply``.

datapath         one node's maps and programs, as the agent uses them
map_writer       what it reads from the maps and writes to them
sound_contents   the maps' content at start, without what no agent has written
probe            which features this kernel has, found by trying them
kernel           bpf(2): one function for each command
attributes       the structs of bpf(2)
declarations     C declarations as types of cffi, parsed when an installation is made
side_by_side     several calls at a time

programs    bpf/ -> compiled and loaded programs
attach      attaches programs to the cgroup and to devices
recording   runs the programs beside those in force, to see what they decide
monitoring  events of decisions, while somebody looks
maps        the maps: their layout, their entries, where they are pinned, and the sweep of flows
"""
