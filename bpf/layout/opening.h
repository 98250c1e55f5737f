/* SPDX-License-Identifier: GPL-2.0 */
/* The latest flows that were opened in the kernel's conntrack; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_OPENING_H
#define EBPFLB_LAYOUT_OPENING_H

enum opening_limit {
	OPENINGS = 4096,
	NOTE_LOST_SECONDS = 600,	/* how long what `note_lost` tells counts */
};

struct opening {
	struct tuple tuple;	/* of the packet that opened the flow */
	__u64 created;		/* nanoseconds of CLOCK_MONOTONIC; 0: none yet */
	__u32 service;
	__u32 backend;
	__u8 left;		/* the packet has left by a device, or it is for this node itself */
	__u8 is_pending;	/* session affinity is to be remembered once the client is known */
	__u8 pad[6];
};
SIZE(struct opening, 64);

/* `opened` and `tried` never decrease: modulo OPENINGS they are places. */
struct opening_counts {
	__u64 opened;
	__u64 tried;	/* the first of these were asked to give way, or are forgotten */
	__u64 note_lost;	/* when a flow was seen last that was answered without having left */
};
SIZE(struct opening_counts, 24);

#endif
