/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A socket's call, from top to bottom: a backend is selected, the socket remembers the frontend,
 * the kernel goes on with the backend's address. In the other direction, the application sees the
 * frontend where the kernel names the backend.
 */
#ifndef EBPFLB_PATH_SOCKET_H
#define EBPFLB_PATH_SOCKET_H

#include "path/select.h"
#include "path/socket_datagram.h"
#include "path/socket_stream.h"

/* For connect and sendmsg. On VERDICT_TRANSLATED `backend` is the new peer. */
static __always_inline enum verdict socket_translate(const struct request *request,
						     struct backend *backend)
{
	struct selection selection;
	enum selected selected = select_backend(request, &selection);

	if (selected != SELECTED)
		return verdict_count(selected_verdict(selected, &request->frontend->address));
	if (request->frontend->protocol == UDP)
		datagram_open(request, &selection);
	else
		stream_open(request->socket, request->frontend, &selection.backend);
	*backend = selection.backend;
	return verdict_count(VERDICT_TRANSLATED);
}

/* For recvmsg and getpeername: the frontend that a peer stands for; NULL if not translated. */
static __always_inline struct peer_frontend *socket_translate_reply(const struct peer *peer,
								    __u8 protocol)
{
	struct peer_frontend *entry = protocol == UDP ? LOOKUP(struct peer_frontend, sockets, peer)
						      : stream_find(peer);

	if (entry)
		verdict_count(VERDICT_REPLY_TRANSLATED);
	return entry;
}

#endif
