# SPDX-License-Identifier: Apache-2.0
"""The access to the kernel: maps, programs, netfilter, devices.

The agent uses this package through datapath.Datapath, which loads and attaches the programs, and is
a map_writer.MapWriter: its ``apply`` writes a plan, and so the slots of an EndpointSlice.

datapath         one node's maps and programs, as the agent uses them
map_writer       reads and writes the maps
valid_contents   the maps' content at start, without entries that no agent can have written
probe            which features this kernel has, found by trying them
bpf              bpf(2): one function for each command; C declarations as types of cffi

stale            finds and ends connections that lead to endpoints which no longer serve
segment          frames on the uplink: beacons of agents, ARP, NDP, tests of hand-overs
handing          the program that hands requests to other nodes, and its maps
quiet_sockets    ends sockets between two requests, so that their connections move
netlink          messages of netlink: encoded and decoded
recording        runs copies of the programs to record their decisions
monitoring       events of decisions, while `ebpflb monitor` runs

programs   bpf/ -> compiled and loaded programs
attach     attaches programs to the cgroup and to devices
maps       the maps: their layout, their entries, where they are pinned, and the sweep of flows
netfilter  NAT and conntrack: the netfilter engine's table, and other programs' rules
node       this machine: devices, namespaces, sysctls, and the traces of a kube-proxy
"""
