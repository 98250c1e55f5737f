# SPDX-License-Identifier: Apache-2.0
"""Make it so: from bpf/ to programs and maps in the kernel.

datapath      one node's maps and programs, as the agent uses them
layout        bpf/layout.h and bpf/maps.h as Python sees them
records       how each map's keys and values read
maps          the maps as collections of values
compiler      bpf/ -> bytecode, from the cache or
bcc_child     by BCC, in a process of its own
programs      bytecode -> programs in the kernel
state         the state directory: what stays when no agent runs
links         programs at the cgroup
devices       programs at devices
tcx           by tcx links
clsact        by filters, where there is no tcx
kernel        bpf(2), a function a command
attributes    and its structs
probe         what this kernel can do, by trying
witness       the cookie of our network namespace
testrun       a packet through a program, without a device
statistics    how often and how long the hooks run
census        how full the LRU maps are
sweep         idle flows go
stale         sockets and flows whose backend serves no more
suspects      which they may be, by the maps
untranslated  and those that were here before us
moving        moves them
sock_diag     ends them by netlink
rebinding     or has the packet path take them elsewhere
"""
