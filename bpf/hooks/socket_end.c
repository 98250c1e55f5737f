/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Forgets a socket that ended without a call of sock_release. The agent runs this program by
 * BPF_PROG_TEST_RUN on a frame that has the socket's cookie in place of a payload. So each count is
 * updated once, by the same code as at a release.
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
	__u64 socket = 0;

	if (bpf_skb_load_bytes(ctx, LINK, &socket, sizeof(socket)))
		return 0;
	entry = socket_find(socket);
	if (!entry)
		return 0;
	if (entry->peer.frontend.protocol == TCP)
		stream_release(socket);
	else
		datagram_release(socket);
	return 0;
}

LICENSE("GPL")
