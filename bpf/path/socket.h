/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A socket's call, from top to bottom: a backend is selected, the socket remembers the frontend,
 * the kernel goes on with the backend's address. In the other direction, the application sees the
 * frontend where the kernel names the backend.
 */
#ifndef EBPFLB_PATH_SOCKET_H
#define EBPFLB_PATH_SOCKET_H

#include "path/reject_socket.h"
#include "path/select.h"
#include "path/socket_datagram.h"
#include "path/socket_stream.h"

/* The system calls that name a peer, and those that are told one. */
enum call { CONNECT, SENDMSG, RECVMSG, GETPEERNAME };

/*
 * Where datagrams go that are refused: to the frontend itself, and a device refuses them (as with
 * kube-proxy, connect() succeeds). At an address of the node they would pass no device, and might
 * reach whoever listens there: they go to another of its ports, at which no process listens.
 */
static __always_inline struct backend datagram_place_refusing(const struct request *request)
{
	const struct frontend *frontend = request->frontend;
	bool is_own = address_is_own(&frontend->address, request->netns);

	return (struct backend){ .address = frontend->address,
				 .port = is_own ? TCPMUX : frontend->port };
}

static __always_inline void socket_forget(const struct request *request)
{
	if (request->frontend->protocol == UDP)
		datagram_release(request->socket);
	else
		stream_release(request->socket);
}

/*
 * A call that gets no backend. A socket that is connected elsewhere has no frontend any more. What
 * a pod's datagram socket sends is translated at the device, as soon as there is a backend; the
 * node's own that are connected are remembered for the agent, with backend 0 (ebpflb/stale_udp).
 */
static __always_inline enum verdict socket_leave(const struct request *request, enum call call,
						 enum selected selected, struct backend *backend)
{
	enum verdict verdict = selected_verdict(selected, &request->frontend->address);

	if (call == CONNECT)
		socket_forget(request);
	if (verdict == VERDICT_REFUSED && request->frontend->protocol == UDP) {
		*backend = datagram_place_refusing(request);
		if (call == CONNECT && netns_is_host(request->netns))
			datagram_open(request, backend, false);
	}
	return verdict_count(verdict);
}

/*
 * Whether a pod's socket is left to the packet path. One that sends datagrams goes on to the backend
 * that it got before the operator chose so.
 */
static __always_inline bool socket_is_left(const struct request *request, enum call call)
{
	return !netns_is_translated(request->netns) &&
	       !(call == SENDMSG && assignment_of(request));
}

/* On VERDICT_TRANSLATED, and if datagrams are refused, `backend` is the new peer. */
static __always_inline enum verdict socket_translate(const struct request *request, enum call call,
						     struct backend *backend)
{
	struct selection selection;
	enum selected selected = socket_is_left(request, call)
					 ? LEFT_TO_PACKETS : select_backend(request, &selection);

	if (selected != SELECTED)
		return socket_leave(request, call, selected, backend);
	if (request->frontend->protocol == UDP)
		datagram_open(request, &selection.backend, selection.is_assigned);
	else
		stream_open(request, &selection.backend);
	*backend = selection.backend;
	return verdict_count(VERDICT_TRANSLATED);
}

/*
 * For recvmsg and getpeername: the frontend that a peer stands for; NULL if not translated. No hook
 * sees connect() to AF_UNSPEC, so a socket that is no longer connected has no frontend.
 */
static __always_inline struct peer_frontend *
socket_translate_reply(const struct peer *peer, enum call call, __u8 protocol, bool has_peer)
{
	struct peer_frontend *entry = protocol == UDP ? LOOKUP(struct peer_frontend, sockets, peer)
						      : stream_find(peer);

	if (!entry || (entry->is_connected && !has_peer))
		return NULL;
	if (call == RECVMSG && protocol == UDP)
		assignment_reply(peer->socket, &entry->frontend);
	verdict_count(VERDICT_REPLY_TRANSLATED);
	return entry;
}

#endif
