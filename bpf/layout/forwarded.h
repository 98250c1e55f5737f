/* SPDX-License-Identifier: GPL-2.0 */
/* Connections to a frontend's address that this node only forwards; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_FORWARDED_H
#define EBPFLB_LAYOUT_FORWARDED_H

/* One of these connections; its key is the tuple of its requests at egress. */
struct forwarded {
	__u64 since;		/* nanoseconds of CLOCK_MONOTONIC */
	__u8 hops;		/* TTL or hop limit of the first packet, as it left */
	__u8 replied;		/* a reply has been forwarded too */
	__u16 pad;
	__u32 pad2;
};
SIZE(struct forwarded, 16);

#endif
