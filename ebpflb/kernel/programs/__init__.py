# SPDX-License-Identifier: Apache-2.0
"""From bpf/ to programs in the kernel: compiled, and loaded with their maps.

compiler        bpf/ -> bytecode: from the installation, from the cache, or by bcc_child
precompile      makes the bytecode of an installation
bcc_child       the process that runs BCC
kernel_places   what a program calls and reads of the running kernel, by the kernel's types
loader          bytecode -> programs in the kernel
"""
