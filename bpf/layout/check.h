/* SPDX-License-Identifier: GPL-2.0 */
/* How map elements name their keys (core/check.h); a part of layout.h. */
#ifndef EBPFLB_LAYOUT_CHECK_H
#define EBPFLB_LAYOUT_CHECK_H

enum check_number {
	CHECK_FACTOR = 0x1e3779b1,	/* a word's factor is a power of it, modulo 2^64 */
	CHECK_FIRST = 3,		/* the first word's: from here on all bits of the powers are in use */
};

#endif
