/* SPDX-License-Identifier: GPL-2.0 */
#define PAGE_SHIFT 12
#define PAGE_SIZE (1UL << PAGE_SHIFT)
