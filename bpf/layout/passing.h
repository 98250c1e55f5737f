/* SPDX-License-Identifier: GPL-2.0 */
/* What is remembered for moments only; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_PASSING_H
#define EBPFLB_LAYOUT_PASSING_H

/* An IP datagram in fragments, as a hook sees it. */
struct datagram {
	struct address source;
	struct address destination;
	__u32 id;
	__u8 protocol;
	__u8 hook;		/* enum hook */
	__u16 pad;
};
SIZE(struct datagram, 40);

/* What only its first fragment says. */
struct ports {
	__u64 seen;		/* nanoseconds of CLOCK_MONOTONIC */
	__be16 source_port;
	__be16 destination_port;
	__u32 pad;
};
SIZE(struct ports, 16);

/* Where the opening of a flow is worked out, on one CPU: too large for a program's stack. */
struct arrival {
	struct flow flow;
	struct tuple back;	/* the backend's packets */
	struct tuple other;	/* another entry of the flow, or of the one that is in its way */
	struct service service;
	struct backend backend;
	__u32 pad;
};
SIZE(struct arrival, 224);

/* How many more packets may be refused with an answer, on one CPU. */
struct allowance {
	__u64 refilled;		/* nanoseconds of CLOCK_MONOTONIC */
	__u64 left;
};
SIZE(struct allowance, 16);

#endif
