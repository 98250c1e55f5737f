/* SPDX-License-Identifier: GPL-2.0 */
/* What the datapath remembers of sockets; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_SOCKET_H
#define EBPFLB_LAYOUT_SOCKET_H

/* A datagram socket and a backend that it talks to. */
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

/*
 * What is remembered of a socket: what a stream socket is connected to, or the first frontend that a
 * datagram socket was connected to or sent to. Of a further frontend the same, under its own key;
 * only datagram sockets use what follows the peer.
 */
struct socket_entry {
	struct peer_frontend peer;
	__u16 service;		/* there are 65,536 ids */
	__u8 is_shared;		/* another frontend has the same backend: peers says whose replies are */
	__u8 is_unlisted;	/* counted as closed at once: no release finds it */
	__u64 expires;		/* nanoseconds of CLOCK_MONOTONIC */
	__u64 stream_from;	/* from then on it is a stream; 0: no reply was seen */
	__u64 netns;		/* cookie of its network namespace */
	struct frontend next;	/* of the list of the socket's further frontends; no port: its end */
	__u32 counted;		/* 0: by no backend_load; a stream socket's: its generation, plus 1 */
};
SIZE(struct socket_entry, 96);

/* The entry of a socket, at the place that its cookie has modulo the number of places. */
struct socket_place {
	__u64 socket;		/* cookie; 0: the place is free; see claim_of */
	__u32 lock;		/* struct bpf_spin_lock */
	__u32 pad;
	struct socket_entry entry;
};
SIZE(struct socket_place, 112);

/* What the agent has forgotten by a program (hooks/socket_end.c). */
struct ended_socket {
	__u64 socket;		/* cookie */
	struct peer_frontend peer;	/* only this peer of a datagram socket; no port: the whole socket */
	__u32 pad;
};
SIZE(struct ended_socket, 56);

/* A datagram socket and a further frontend that it sends to. */
struct assignment_key {
	__u64 socket;		/* cookie */
	struct frontend frontend;
	__u32 pad;
};
SIZE(struct assignment_key, 32);

/* Connections and flows that were not remembered as the table of sockets was full, by protocol. */
struct sockets_full {
	__u64 streams;
	__u64 datagrams;
	__u64 elsewhere;	/* sockets in the map sockets; at 0 it need not be asked */
};
SIZE(struct sockets_full, 24);

#endif
