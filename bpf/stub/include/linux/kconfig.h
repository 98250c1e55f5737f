/* SPDX-License-Identifier: GPL-2.0 */
/*
 * BCC force-includes this file first. It looks for kernel headers; this folder is all it finds,
 * so that a node needs none. BCC brings its own copy of the kernel's bpf.h.
 */
#define CONFIG_BPF_SYSCALL 1
