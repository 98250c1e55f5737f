/* SPDX-License-Identifier: GPL-2.0 */
/* The entries of a flow that the agent ends (engine/flows/expire.h); a part of layout.h. */
#ifndef EBPFLB_LAYOUT_EXPIRED_H
#define EBPFLB_LAYOUT_EXPIRED_H

enum flow_size {
	FLOW_ENTRIES = 4,	/* the most that a flow has */
};

enum entry_end {
	ENTRY_DELETED = 0,
	ENTRY_RESTS = 1,	/* it becomes FLOW_RESTING */
};

struct expired_entry {
	struct tuple tuple;	/* zero: no entry */
	__u64 time;		/* last_seen, as the agent has read it */
	__u32 end;		/* enum entry_end */
	__u32 pad;
};
SIZE(struct expired_entry, 56);

#endif
