/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Whether a client's TCP connection may be ended so that it moves to another endpoint: only between two
 * requests. The kernel does not know requests. It knows that everything sent was acknowledged, that
 * everything received was read, and who has sent last: a client that waits for a response has.
 *
 * A server may also send without being asked: the tickets of TLS, the settings of HTTP/2. It does so in
 * answer to a client's first words, before its first response. So only a connection counts that was idle
 * once, and has sent since.
 */
#ifndef EBPFLB_SOCKETS_QUIET_H
#define EBPFLB_SOCKETS_QUIET_H

#include "compat.h"
#include "layout.h"

#define ESTABLISHED 1	/* TCP_ESTABLISHED */

/* What the kernel knows of a connection (struct tcp_sock), read under the socket's lock. */
struct tcp_numbers {
	__u8 state;
	__u32 sent;		/* write_seq */
	__u32 acknowledged;	/* snd_una */
	__u32 received;		/* rcv_nxt */
	__u32 read;		/* copied_seq */
	__u32 acknowledged_by;	/* snd_wl1: the number of the segment that acknowledged, or of a later one */
	__u32 last_sent;	/* lsndtime, in jiffies: data, not acknowledgements */
	__u32 last_received;	/* lrcvtime, the same */
	__u64 backlog;		/* the first segment that waits for the lock */
	__u64 out_of_order;	/* the first segment behind a gap */
	__u64 user_data;	/* of the kernel's own sockets, and those that other programs steer */
	__u64 ulp;		/* of TLS in the kernel, and others that keep data of their own */
};

static __always_inline bool nothing_is_under_way(const struct tcp_numbers *now)
{
	return now->state == ESTABLISHED && now->sent == now->acknowledged &&
	       now->received == now->read && !now->backlog && !now->out_of_order &&
	       !now->user_data && !now->ulp;
}

/*
 * The direction rule. Within one jiffy (1 to 10 ms) the order of the numbers says it: if the server sent
 * data after it had acknowledged all of the client's, these begin at or behind that acknowledgement.
 */
static __always_inline bool server_was_last(const struct tcp_numbers *now)
{
	__s32 after = now->last_received - now->last_sent;

	return after > 0 || (!after && (__s32)(now->acknowledged_by - now->received) < 0);
}

/* Notes what is seen of a socket; returns whether it is to be ended now. */
static __always_inline bool quiet_look(struct quiet_socket *socket, const struct tcp_numbers *now,
				       __u64 time)
{
	bool has_sent = socket->sent != now->sent;

	if (!socket->since || has_sent || socket->received != now->received) {
		if (socket->state == QUIET_READY || (socket->state == QUIET_ONCE && has_sent))
			socket->state = QUIET_USED;
		socket->since = time;
		socket->sent = now->sent;
		socket->received = now->received;
		return false;
	}
	if (time - socket->since < socket->idle || !nothing_is_under_way(now) ||
	    !server_was_last(now))
		return false;
	if (socket->state == QUIET_NEVER)
		socket->state = QUIET_ONCE;
	else if (socket->state == QUIET_USED)
		socket->state = QUIET_READY;
	return socket->state == QUIET_READY && socket->ends;
}

#endif
