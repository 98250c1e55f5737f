/* SPDX-License-Identifier: GPL-2.0 */
/* What decides whether a socket may move to another endpoint; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_QUIET_SOCKET_H
#define EBPFLB_LAYOUT_QUIET_SOCKET_H

/*
 * In bytecode these numbers stand for a function of the kernel, and for the places of fields in its struct
 * tcp_sock; the agent replaces them (ebpflb/kernel/quiet_sockets.py).
 */
enum kernel_place {
	KERNEL_SOCK_DESTROY = 0xEB0000,
	KERNEL_STATE,
	KERNEL_WRITE_SEQ,
	KERNEL_SND_UNA,
	KERNEL_RCV_NXT,
	KERNEL_COPIED_SEQ,
	KERNEL_SND_WL1,
	KERNEL_LSNDTIME,
	KERNEL_LRCVTIME,
	KERNEL_BACKLOG,
	KERNEL_OUT_OF_ORDER,
	KERNEL_USER_DATA,
	KERNEL_ULP_OPS,
};

enum quiet_state {
	QUIET_NEVER = 0,	/* it was not idle yet while the agent looked */
	QUIET_ONCE,		/* it was: what may follow a handshake has come */
	QUIET_USED,		/* and has sent since */
	QUIET_READY,	/* and is idle again, as it has to be */
	QUIET_ENDED,	/* the program has ended it */
};

/* What is known of a socket, by its cookie, while its endpoint has too many. */
struct quiet_socket {
	__u64 idle;		/* nanoseconds for which it has to be idle */
	__u64 since;		/* when its numbers were seen first, by CLOCK_MONOTONIC; 0: not yet */
	__u32 sent;		/* the numbers of the next bytes to send, and to receive */
	__u32 received;
	__u32 state;		/* enum quiet_state */
	__u32 ends;		/* 1: the agent wants its end if it is ready */
};
SIZE(struct quiet_socket, 32);

#endif
