/* SPDX-License-Identifier: GPL-2.0 */
/* Only asked by BCC's helpers.h; network program types do not carry a kernel version. */
#define KERNEL_VERSION(a, b, c) (((a) << 16) + ((b) << 8) + (c))
#define LINUX_VERSION_CODE KERNEL_VERSION(5, 10, 0)
