/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Handles a socket's call, from top to bottom: a backend is selected, the socket remembers the
 * frontend, and the kernel goes on with the backend's address. In the other direction, the kernel
 * names the backend and the application sees the frontend.
 */
#ifndef EBPFLB_PATH_SOCKET_H
#define EBPFLB_PATH_SOCKET_H

#include "path/select_backend.h"
#include "record/event_call.h"
#include "sockets/datagram.h"
#include "sockets/reject.h"
#include "sockets/stream.h"

/* The system calls that name a peer, and those that return one. */
enum call { CONNECT, SENDMSG, RECVMSG, GETPEERNAME };

static __always_inline void socket_forget(const struct request *request)
{
	if (request->frontend->protocol == UDP)
		datagram_release(request->socket);
	else
		stream_release(request->socket);
}

/*
 * The node's own address, if it has one, so that a socket connected to it gets the source that it would
 * have for other destinations: resolvers look at it.
 */
static __always_inline struct address address_here(const struct request *request)
{
	const struct address *node = client_address(request);

	return node && LOOKUP(__u32, own_addresses, node)
		       ? *node : address_loopback(&request->frontend->address);
}

/*
 * Refuses datagrams. As with kube-proxy connect() succeeds: to the frontend itself, where a device
 * refuses them. The node's own datagrams may pass no device with a program, and at its own address they
 * might reach a process that listens there. So they go to a port of the node on which no process
 * listens.
 *
 * Datagrams of a pod's socket are translated at the device, as soon as there is a backend. The
 * node's own connected sockets are remembered for the agent, with backend 0
 * (ebpflb/kernel/stale.py).
 */
static __always_inline enum answer datagram_refuse(const struct request *request,
						   const enum call call, struct backend *backend)
{
	const struct frontend *frontend = request->frontend;

	if (call != CONNECT)
		return reject_connection(frontend, backend);
	*backend = (struct backend){ .address = frontend->address, .port = frontend->port };
	if (netns_is_host(request->netns)) {
		backend->address = address_here(request);
		backend->port = TCPMUX;
		datagram_open(request, backend, false, false);
	}
	return REWRITE;
}

/*
 * Handles a call that gets no backend. A socket that is connected elsewhere has no frontend any
 * more. Devices drop a pod's packets that must be dropped, at ingress. But the node's own may pass no
 * device with a program, so the call itself is rejected.
 */
static __always_inline enum answer socket_without_backend(const struct request *request,
							  const enum call call,
							  enum selected selected,
							  struct backend *backend)
{
	const struct frontend *frontend = request->frontend;

	verdict_count(monitor_request(request, call, backend, selected_verdict(selected)));
	FORGET_VALUE(selected, request->socket);
	if (call == CONNECT)
		socket_forget(request);
	switch (selected) {
	case NO_SUCH_PORT:
	case NO_ENDPOINT:
		return frontend->protocol == UDP ? datagram_refuse(request, call, backend)
						 : reject_connection(frontend, backend);
	case SELECT_RECYCLED:
		return reject_connection(frontend, backend);
	case NO_LOCAL_ENDPOINT:
	case SOURCE_DENIED:
	case NOT_ALLOCATED:
		return netns_is_host(request->netns)
			       ? drop_connection(frontend, backend) : LEAVE;
	default:
		return LEAVE;
	}
}

/*
 * Whether a pod's socket is left to the packet path. A socket that sends datagrams keeps the
 * backend that it got before the operator set this option.
 */
static __always_inline bool socket_is_left(const struct request *request, const enum call call)
{
	return !netns_is_translated(request->netns) &&
	       !(call == SENDMSG && assignment_of(request));
}

/*
 * Selects the backend of a socket. A function of its own, so that the selection and the socket's entry
 * share their place on the stack.
 */
static __always_inline enum selected socket_select(const struct request *request,
						   struct backend *backend, bool *is_assigned,
						   bool *is_counted)
{
	struct selection selection ALIGNED;
	enum selected selected;

	ON_STACK(selection);
	selected = select_backend(request, &selection);
	if (selected != SELECTED)
		return selected;
	*backend = selection.backend;
	*is_assigned = selection.is_assigned;
	*is_counted = selection.service.flags & SERVICE_LEAST_CONNECTIONS;
	return selected;
}

/*
 * Returns what to do with a call; with REWRITE it goes to `backend`. With --shadow a call goes on
 * unchanged, and a pod's call is counted when its packets leave the pod, so that each is counted
 * once.
 */
static __always_inline enum answer socket_translate(const struct request *request,
						    const enum call call, struct backend *backend)
{
	bool shadow = is_shadow(), is_assigned = false, is_counted = false;
	enum selected selected;

	if (!request->frontend->protocol) {
		record(STEP_FOREIGN, 0);
		return LEAVE;
	}
	if (shadow && call == CONNECT)
		socket_forget(request);
	if (shadow && !netns_is_host(request->netns))
		return LEAVE;
	if (!shadow && socket_is_left(request, call)) {
		record(STEP_LEFT_TO_PACKETS, 0);
		selected = LEFT_TO_PACKETS;
	} else {
		selected = socket_select(request, backend, &is_assigned, &is_counted);
	}
	if (shadow) {
		verdict_count(monitor_request(request, call, backend, selected_verdict(selected)));
		return LEAVE;
	}
	if (selected != SELECTED)
		return socket_without_backend(request, call, selected, backend);
	if (request->frontend->protocol == UDP)
		datagram_open(request, backend, is_assigned, is_counted);
	else
		stream_open(request, backend, is_counted);
	verdict_count(monitor_request(request, call, backend, VERDICT_TRANSLATED));
	return REWRITE;
}

/*
 * For recvmsg and getpeername: returns the frontend that a peer stands for, or NULL if the peer is
 * not translated. No hook sees connect() to AF_UNSPEC, so a socket that is no longer connected has
 * no frontend.
 */
static __always_inline struct peer_frontend *
socket_translate_reply(const struct peer *peer, const enum call call, __u8 protocol, bool has_peer)
{
	struct peer_frontend *entry = protocol == UDP ? datagram_find(peer) : stream_find(peer);

	if (!entry || (entry->is_connected && !has_peer))
		return NULL;
	if (call == RECVMSG && protocol == UDP)
		assignment_reply(peer->socket, &entry->frontend);
	verdict_count(VERDICT_REPLY_TRANSLATED);
	return entry;
}

#endif
