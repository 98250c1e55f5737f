/* SPDX-License-Identifier: GPL-2.0 */
/* How a chosen backend is passed from ingress to netfilter's rules; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_CHOICE_H
#define EBPFLB_LAYOUT_CHOICE_H

/* The bits of skb->priority, which the rules in ebpflb/kernel/netfilter/table.py read. */
enum chosen {
	CHOSEN = 0xeb000000,	/* the packet has a choice ... */
	CHOSEN_MASK = 0xff000000,	/* ... if these bits are so */
	CHOSEN_MASQUERADE = 0x00800000,	/* the backend sees this node as its client */
	CHOSEN_LIFTED = 0x00400000,	/* CHOSEN_BAND's bits of the id are CHOSEN_LIFT bits higher */
	CHOSEN_ID = 0x003fffff,	/* the backend's id */
};
#define CHOSEN_BAND 15	/* the bits by which qdiscs pick a band */
#define CHOSEN_LIFT 18	/* to the highest bits of an id */

/* The choice for the datagrams of one flow: netfilter translates the first one, and counts all. */
struct datagram_choice {
	__u32 service;
	__u32 chosen;		/* enum chosen */
	__u32 frontend_moves;	/* as in the settings when the backend was chosen */
	__u32 check;		/* names the flow (core/check.h); what follows changes in place */
	__u64 last_used;	/* nanoseconds of CLOCK_MONOTONIC */
};
SIZE(struct datagram_choice, 24);

/*
 * What packets of a tuple got last. Two CPUs may write at once: `name` is the tuple's and the epoch's,
 * mixed with `choice`, so that the halves of two writes name nothing.
 */
struct recent_choice {
	__u64 name;
	__u64 choice;		/* the service's id, then enum chosen; 0: nothing */
};
SIZE(struct recent_choice, 16);

#endif
