/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The socket's way from top to bottom: what was asked for -> service -> backend -> remembered.
 */
#ifndef EBPFLB_PATH_SOCKET_H
#define EBPFLB_PATH_SOCKET_H

#include "path/select.h"
#include "path/socket_datagram.h"
#include "path/policy.h"
#include "path/socket_stream.h"
#include "net/protocol.h"

/* What an application asks of its socket. */
struct request {
	struct frontend to;
	__u64 socket;
	__u64 netns;
};

static __always_inline enum verdict serve_stream(const struct request *request,
						 const struct service *service,
						 struct backend *backend)
{
	struct affinity_key client = { .netns = request->netns, .service = service->id };
	bool confined = policy_confines(service, true);
	__u32 draw = bpf_get_prandom_u32();
	enum verdict verdict = choose_backend(&client, service, confined, draw, backend);

	if (verdict == VERDICT_TRANSLATED)
		stream_remember(request->socket, &request->to, backend);
	return verdict;
}

static __always_inline enum verdict serve_datagram(const struct request *request,
						   const struct service *service,
						   struct backend *backend)
{
	struct assignment_key sender = { .socket = request->socket, .frontend = request->to };
	struct affinity_key client = { .netns = request->netns, .service = service->id };

	if (!assignment_find(&sender, service->id, backend)) {
		bool confined = policy_confines(service, true);
		__u32 draw = bpf_get_prandom_u32();
		enum verdict verdict =
			choose_backend(&client, service, confined, draw, backend);

		if (verdict != VERDICT_TRANSLATED)
			return verdict;
		assignment_make(&sender, backend);
	}
	datagram_remember(&sender, backend);
	return VERDICT_TRANSLATED;
}

/*
 * The node's own sockets ask as the node. A pod's address is not known here: its packets are
 * looked at when they leave the pod, and served there.
 */
static __always_inline enum verdict serve_restricted(const struct service *service, __u64 netns)
{
	struct settings *settings = settings_read();

	if (!settings || !netns_is_host(netns))
		return VERDICT_PASSED;
	return policy_admits(service, address_is_v4(&service->frontend.address)
					      ? &settings->node_v4
					      : &settings->node_v6)
		       ? VERDICT_TRANSLATED
		       : VERDICT_SOURCE_DENIED;
}

static __always_inline enum verdict serve_once(const struct request *request,
					       struct backend *backend)
{
	struct service service;
	enum found found = service_find(&request->to, request->netns, &service);

	if (found == ABSENT)
		return policy_unserved(&request->to.address);
	if (found == RECYCLED)
		return VERDICT_RECYCLED;
	if (service.flags & SERVICE_RESTRICTED) {
		enum verdict verdict = serve_restricted(&service, request->netns);

		if (verdict != VERDICT_TRANSLATED)
			return verdict;
	}
	if (request->to.protocol == UDP)
		return serve_datagram(request, &service, backend);
	return serve_stream(request, &service, backend);
}

/*
 * What changed hands while we looked is asked for again, once. Written out: of a loop around all
 * this clang makes one that is entered in its middle, which 5.10 and 6.1 refuse ("back-edge").
 */
static __always_inline enum verdict serve(const struct request *request, struct backend *backend)
{
	enum verdict verdict = serve_once(request, backend);

	if (verdict == VERDICT_RECYCLED) {
		verdict_count(VERDICT_RETRIED);
		verdict = serve_once(request, backend);
	}
	return verdict_count(verdict);
}

/* The frontend that this peer stands for, or NULL where we translated nothing. */
static __always_inline struct peer_frontend *serve_restore(const struct peer *peer, __u8 protocol)
{
	struct peer_frontend *origin = protocol == UDP ? LOOKUP(struct peer_frontend, sockets, peer)
						: stream_origin(peer);

	if (origin)
		verdict_count(VERDICT_REPLY_TRANSLATED);
	return origin;
}

#endif
