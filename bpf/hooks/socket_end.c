/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Forgets a socket that ended without a call of sock_release, or a peer of a datagram socket whose
 * connection the agent has ended. The agent runs this program by BPF_PROG_TEST_RUN on a frame that has
 * a struct ended_socket in place of a payload. So each count is updated once, by the same code as at a
 * release, and what the socket's owner does at the same time is not overwritten.
 */
#include "compat.h"
#include "maps.h"
#include "net/header.h"
#include "sockets/datagram.h"
#include "sockets/stream.h"

PROGRAM("tc/ingress")
int socket_ending(struct __sk_buff *ctx)
{
	struct socket_entry *entry;
	struct ended_socket ended;

	if (bpf_skb_load_bytes(ctx, LINK, &ended, sizeof(ended)))
		return 0;
	entry = socket_find(ended.socket);
	if (ended.peer.port)
		datagram_end(ended.socket, &ended.peer);
	else if (entry && entry->peer.frontend.protocol == TCP)
		stream_release(ended.socket);
	else if (entry)
		datagram_release(ended.socket);
	return 0;
}

LICENSE("GPL")
