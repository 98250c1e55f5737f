# SPDX-License-Identifier: Apache-2.0
"""From bpf/ to programs in the kernel: compiled, and loaded with their maps.

compiler        bpf/ -> bytecode: brought along, from the cache, or by bcc_child
precompile      makes the bytecode that an installation brings along
bcc_child       the process that runs BCC
bytecode_cache  bytecode in files, which count only if they are whole and ours
compile_folder  where bcc_child finds the sources; removes what a kill left
loader          bytecode -> programs in the kernel
program_set     the programs of a variant that may take the place of the usual ones
btf             reads the kernel's description of its types
testrun         runs a program on a packet, without a device
"""
