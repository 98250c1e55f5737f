/* SPDX-License-Identifier: GPL-2.0 */
/* A flow that the agent takes for expired (engine/flows/expire.h); a part of layout.h. */
#ifndef EBPFLB_LAYOUT_EXPIRED_H
#define EBPFLB_LAYOUT_EXPIRED_H

enum flow_size {
	FLOW_ENTRIES = 4,	/* the most that a flow has */
};

struct expired_entry {
	struct tuple tuple;	/* zero: no entry */
	__u64 last_seen;	/* as the agent has read it */
	__u32 rests;		/* it becomes FLOW_RESTING; else it is deleted */
	__u32 pad;
};
SIZE(struct expired_entry, 56);

#endif
