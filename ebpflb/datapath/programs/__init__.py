# SPDX-License-Identifier: Apache-2.0
"""From bpf/ to programs in the kernel: compiled, and loaded with their maps.

compiler   bpf/ -> bytecode: from the cache, or by bcc_child
bcc_child  the process that runs BCC
loader     bytecode -> programs in the kernel
kfuncs     the kernel's own functions that programs call
btf        reads the kernel's description of its types
testrun    runs a program on a packet, without a device
"""
