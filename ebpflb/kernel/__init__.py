# SPDX-License-Identifier: Apache-2.0
"""Everything that is asked of the kernel: maps, programs, netfilter, devices.

The agent uses all of it through datapath.Datapath: it loads and attaches the programs, and writes
plans to the maps; an EndpointSlice's slots are written there, by ``apply``.

datapath         one node's maps and programs, as the agent uses them
map_writer       what it reads from the maps and writes to them
sound_contents   the maps' content at start, without what no agent has written
probe            which features this kernel has, found by trying them
bpf              bpf(2): one function for each command
declarations     C declarations as types of cffi, parsed when an installation is made
attributes       the structs of bpf(2)
libc             calls of the C library that Python does not have
side_by_side     several calls at a time

netlink          messages of netlink, made and taken apart
recording        runs the programs beside those in force, to see what they decide
monitoring       events of decisions, while somebody looks

programs   bpf/ -> compiled and loaded programs
attach     attaches programs to the cgroup and to devices
maps       the maps: their layout, their entries, where they are pinned, and the sweep of flows
netfilter  NAT and conntrack: the engine netfilter's table, and the rules of others
node       this machine: devices, namespaces, sysctls, and what a kube-proxy does on it
"""
