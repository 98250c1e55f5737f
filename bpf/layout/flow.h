/* SPDX-License-Identifier: GPL-2.0 */
/* What the datapath remembers of flows of packets; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_FLOW_H
#define EBPFLB_LAYOUT_FLOW_H

enum hook {
	HOOK_INGRESS = 1,	/* a packet comes in from a device: before the stack */
	HOOK_EGRESS = 2,	/* a packet leaves by a device: after the stack */
	HOOK_CLAIM = 3,		/* no packet: a CPU is taking over the port of this tuple */
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

/*
 * What an entry does. A flow through frontend F from client C to backend B has two entries, and
 * two more where it is masqueraded as this node N:
 *
 *   FLOW_DNAT     ingress  C -> F  destination := B
 *   FLOW_SNAT     egress   C -> B  source := N
 *   FLOW_UN_SNAT  ingress  B -> N  destination := C
 *   FLOW_UN_DNAT  egress   B -> C  source := F
 *
 * A direct connection, from C to B itself, has entries only where C's port had to be changed.
 */
enum flow_kind {
	FLOW_DNAT = 1,
	FLOW_UN_DNAT = 2,
	FLOW_SNAT = 3,
	FLOW_SNAT_PENDING = 4,	/* becomes FLOW_SNAT when egress allocates address and port */
	FLOW_UN_SNAT = 5,
	FLOW_DIRECT = 6,	/* ingress: C's port is changed */
	FLOW_UN_DIRECT = 7,	/* egress: C's port is restored */
	FLOW_RESTING = 8,	/* was FLOW_UN_SNAT or FLOW_UN_DNAT: keeps a closed flow's port */
};

enum flow_flag {
	FLOW_REQUEST = 1,	/* the client's packets; else the backend's */
	FLOW_MASQUERADE = 2,	/* the backend sees this node as its client */
	FLOW_SEEN = 4,		/* of a reply: one has passed; of a request: flow_is_answered */
	FLOW_FIN = 8,		/* this side has closed; TCP and SCTP */
	FLOW_RST = 16,		/* this side has reset, or aborted */
	FLOW_AFFINITY = 32,	/* with FLOW_SEEN, session affinity is remembered */
	FLOW_GONE = 64,		/* written by former versions; means nothing (removed: maps would not be kept) */
};

/*
 * How the packets of one tuple are rewritten (flow_translate in engine/flows/table.h). An entry is one
 * direction at one hook; a flow has two or four.
 */
struct flow {
	__u64 created;		/* nanoseconds of CLOCK_MONOTONIC; the same in all entries of a flow */
	__u64 connection;	/* its number in connections, of both entries between C and F; 0: none */
	struct address address;	/* new address of the destination (ingress) or source (egress) */
	__be16 port;		/* its new port */
	__be16 other_port;	/* new port of the opposite end; its address is kept */
	__u32 service;		/* 0 for direct connections */
	__u32 backend;
	__u32 ifindex;		/* where the client's packets come in */
	__u8 kind;		/* enum flow_kind */
	__u8 pad_kind[3];
	__u32 check;		/* core/check.h; what follows is changed in place */
	__u16 flags;		/* enum flow_flag */
	__u16 packets;		/* unused; without it an upgrade would empty the flow tables */
	__u32 frontend_moves;	/* of a UDP request: when its frontend was last looked up; 0: never */
	__u64 last_seen;
	/*
	 * TCP's numbers of this side, in host order (engine/flows/window.h); 0: not known. Of SCTP
	 * `end` is the tag that this side has set, with which the other side sends to it
	 * (engine/flows/window.h).
	 */
	__u32 end;		/* the end of what it has sent */
	__u32 acknowledged;	/* what it has acknowledged */
	__u32 asked;		/* of a request: the end of its last SYN, until the connection goes on */
	__u32 pad_asked;
};
SIZE(struct flow, 88);

enum half_open_limit {
	HALF_OPEN_FLOWS = 16384,	/* of tcp_flows, and as many of other_flows */
};

/* A new flow: half-open, or since then established or deleted. */
struct half_open {
	struct tuple request;
	struct tuple reply;
	__u64 created;		/* as in the flow's entries; 0: none yet */
};
SIZE(struct half_open, 88);

#endif
