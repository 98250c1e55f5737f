/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A connection is translated once, as by conntrack: what a socket hook has translated goes to its
 * backend, also if a Service claims the backend's address as its external address or NodePort
 * (CVE-2020-8554). The packet does not show that, but the kernel keeps its socket on the way from a pod
 * through a veth to ingress here (Linux 4.19), and from this node's own sockets to egress.
 */
#ifndef EBPFLB_SOCKETS_TRANSLATED_H
#define EBPFLB_SOCKETS_TRANSLATED_H

#include "sockets/datagram.h"

/* Whether the packet's socket is known to talk to the packet's destination in place of a frontend. */
static __always_inline bool socket_has_translated(struct __sk_buff *ctx, const struct tuple *tuple)
{
	struct peer peer = { .socket = ctx->sk ? get_socket_cookie(ctx) : 0,
			     .address = tuple->destination,
			     .port = tuple->destination_port };
	struct peer_frontend *found;

	if (!peer.socket)
		return false;
	found = datagram_find(&peer);	/* a stream socket has its own entry alone */
	return found && found->backend;		/* 0: refused, path/socket.h */
}

#endif
