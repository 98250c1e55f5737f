/* SPDX-License-Identifier: GPL-2.0 */
/* What the datapath remembers of sockets; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_SOCKET_H
#define EBPFLB_LAYOUT_SOCKET_H

/*
 * A socket and the backend that it talks to. A stream socket has one peer at a time, so its key
 * leaves address and port zero, and the value names the backend.
 */
struct peer {
	__u64 socket;		/* cookie */
	struct address address;
	__be16 port;
	__u16 pad;
	__u32 pad2;
};
SIZE(struct peer, 32);

/* The frontend that the application asked for, and the backend that it got instead. */
struct peer_frontend {
	struct frontend frontend;
	__u32 backend;
	struct address address;
	__be16 port;
	__u16 is_connected;	/* the socket was connected to it; else it sent there */
};
SIZE(struct peer_frontend, 44);

/* A datagram socket and a frontend that it sends to. A key without frontend: the list's head. */
struct assignment_key {
	__u64 socket;		/* cookie */
	struct frontend frontend;
	__u32 pad;
};
SIZE(struct assignment_key, 32);

/* The backend that the socket keeps for the frontend, and the next element of the socket's list. */
struct assignment {
	__u32 service;
	__u32 backend;
	struct address address;
	__be16 port;
	__u16 pad;
	struct frontend next;
	__u64 expires;		/* nanoseconds of CLOCK_MONOTONIC */
	__u64 stream_from;	/* from then on it is a stream; 0: no reply was seen */
};
SIZE(struct assignment, 64);

#endif
