# SPDX-License-Identifier: Apache-2.0
"""From bpf/ to programs in the kernel: compiled, and loaded on the maps.

compiler   bpf/ -> bytecode, from the cache or
bcc_child  by BCC, in a process of its own
loader     bytecode -> programs in the kernel
testrun    a packet through a program, without a device
"""
