/* SPDX-License-Identifier: GPL-2.0 */
/* What the datapath remembers of packets; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_FLOW_H
#define EBPFLB_LAYOUT_FLOW_H

enum hook {
	HOOK_INGRESS = 1,	/* a packet comes in from a device: destinations are rewritten */
	HOOK_EGRESS = 2,	/* a packet leaves by a device: sources are rewritten */
};

/* A packet as a hook sees it. */
struct tuple {
	struct address source;
	struct address destination;
	__be16 source_port;
	__be16 destination_port;
	__u8 protocol;
	__u8 hook;		/* enum hook */
	__u16 pad;
};
SIZE(struct tuple, 40);

enum flow_flag {
	FLOW_REQUEST = 1,	/* the client's packets; else the backend's */
	FLOW_MASQUERADE = 2,	/* the backend sees this node as its client */
	FLOW_SEEN = 4,		/* such a packet has come by, other than what opens a connection */
	FLOW_FIN = 8,		/* this side has closed; TCP and SCTP */
	FLOW_RST = 16,		/* this side has reset, or aborted */
};

/*
 * What becomes of a packet: its destination at ingress, its source at egress. A flow through F
 * from C to B has two entries, and two more where it is masqueraded as N:
 *
 *   ingress  C -> F  destination := B        egress  C -> B  source := N
 *   ingress  B -> N  destination := C        egress  B -> C  source := F
 */
struct flow {
	__u64 last_seen;	/* nanoseconds of CLOCK_MONOTONIC */
	__u64 created;
	struct address address;
	__be16 port;		/* 0: egress has not chosen the masquerade yet */
	__be16 other_port;	/* what the other side's port becomes; 0: it stays */
	__u32 service;
	__u32 backend;
	__u32 flags;		/* enum flow_flag */
	__u32 ifindex;		/* where the client's packets come in */
	__u32 pad;
};
SIZE(struct flow, 56);

#endif
