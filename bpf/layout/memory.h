/* SPDX-License-Identifier: GPL-2.0 */
/* What the datapath remembers of clients and sockets; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_MEMORY_H
#define EBPFLB_LAYOUT_MEMORY_H

/* Who has session affinity: a network namespace's cookie at sockets, an address in packets. */
struct client {
	__u64 netns;
	struct address address;
	__u32 service;
	__u32 pad;
};
SIZE(struct client, 32);

struct affinity {
	__u64 last_used;	/* nanoseconds of CLOCK_MONOTONIC */
	__u32 backend;
	__u32 pad;
};
SIZE(struct affinity, 16);

/*
 * A socket and who it really talks to. A stream socket has one peer, so its key leaves address
 * and port zero and the value names the peer.
 */
struct peer {
	__u64 socket;		/* cookie */
	struct address address;
	__be16 port;
	__u16 pad;
	__u32 pad2;
};
SIZE(struct peer, 32);

/* What the socket's owner asked for, and which backend it got. */
struct origin {
	struct frontend frontend;
	__u32 backend;
	struct address address;
	__be16 port;
	__u16 pad;
};
SIZE(struct origin, 44);

/* A datagram socket and a frontend it sends to. Without frontend: the head of its chain. */
struct sender {
	__u64 socket;		/* cookie */
	struct frontend frontend;
	__u32 pad;
};
SIZE(struct sender, 32);

/* The backend it keeps, and the next link of the chain: the frontend it sent to before. */
struct assignment {
	__u32 service;
	__u32 backend;
	struct address address;
	__be16 port;
	__u16 pad;
	struct frontend older;
};
SIZE(struct assignment, 48);

#endif
