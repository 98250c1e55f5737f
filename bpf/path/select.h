/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The decision, the same for sockets and packets: which backend does a request get?
 *
 *   frontend -> service; whether conntrack knows the packet's flow; source ranges; the backend that
 *   a datagram socket has; traffic policy; session affinity; else one backend picked by number (kube-proxy.md 4, 7, 9, 11.1)
 *
 * What is done with the backend is up to the caller: path/socket.h gives it to the socket,
 * path/ingress.h opens a flow.
 */
#ifndef EBPFLB_PATH_SELECT_H
#define EBPFLB_PATH_SELECT_H

#include "engine/conntrack/known.h"
#include "path/affinity.h"
#include "path/counters.h"
#include "path/frontend.h"
#include "path/policy.h"
#include "path/socket_datagram.h"

enum selected {
	SELECTED,
	NO_SERVICE,
	NO_ENDPOINT,
	NO_LOCAL_ENDPOINT,
	SOURCE_DENIED,
	FLOW_KNOWN,		/* conntrack has this packet's flow */
	LEFT_TO_PACKETS,	/* a pod's socket: its packets are decided on when they leave the pod */
	SELECT_RECYCLED,	/* a map element was given to another service while it was read */
};

static __always_inline enum selected select_from_list(const struct request *request,
						      struct selection *selection,
						      const struct range *range, __u16 list)
{
	const struct service *service = &selection->service;
	struct backend *backend = &selection->backend;
	const bool from_packet = request->tuple;
	bool has_affinity = service->affinity_seconds;
	struct affinity_key key;
	bool by_affinity = false;

	selection->is_pending = false;
	if (has_affinity) {
		key = affinity_key_of(request, service);
		by_affinity = affinity_find(&key, service, list, false, backend);
	}
	if (has_affinity && !by_affinity && from_packet) {
		selection->is_pending = true;
		by_affinity = affinity_find(&key, service, list, true, backend);
	}
	if (!by_affinity && !backend_pick(service, range, client_number(request), backend))
		return SELECT_RECYCLED;
	if (!by_affinity && has_affinity)
		affinity_remember(&key, backend->id, from_packet);
	service_count_chosen(service->id, by_affinity);
	return SELECTED;
}

static __always_inline enum selected select_by_policy(const struct request *request,
						      struct selection *selection)
{
	const struct service *service = &selection->service;
	bool is_local_client = client_is_local(request);
	bool local_only = policy_is_local_only(service, is_local_client);
	bool has_endpoints = service->flags & SERVICE_ENDPOINTS;
	struct range range = local_only ? service->local : service->cluster;

	selection->is_local_client = is_local_client;
	if (range.size)
		return select_from_list(request, selection, &range,
					local_only ? BACKEND_LOCAL : BACKEND_CLUSTER);
	service_count_no_backend(service->id, has_endpoints);
	return has_endpoints ? NO_LOCAL_ENDPOINT : NO_ENDPOINT;
}

static __always_inline enum selected select_once(const struct request *request,
						 struct selection *selection)
{
	const struct service *service = &selection->service;
	enum found found = service_find(request->frontend, request->netns, &selection->service);

	if (found != FOUND)
		return found == ABSENT ? NO_SERVICE : SELECT_RECYCLED;
	if (request->tuple && conntrack_knows(request))
		return FLOW_KNOWN;
	if (service->flags & SERVICE_RESTRICTED) {
		const struct address *client = client_address(request);

		if (!client)
			return LEFT_TO_PACKETS;
		if (!policy_admits(service, client))
			return SOURCE_DENIED;
	}
	selection->is_assigned = !request->tuple && request->frontend->protocol == UDP &&
				 assignment_find(request, service->id, &selection->backend);
	return selection->is_assigned ? SELECTED : select_by_policy(request, selection);
}

/*
 * If a map element was recycled while it was read, everything is looked up again, once. No loop:
 * clang compiles a loop here into one that is entered in its middle, which the verifiers of 5.10
 * and 6.1 reject (back-edge).
 */
static __always_inline enum selected select_backend(const struct request *request,
						    struct selection *selection)
{
	enum selected selected = select_once(request, selection);

	if (selected != SELECT_RECYCLED)
		return selected;
	verdict_count(VERDICT_RETRIED);
	return select_once(request, selection);
}

/* The verdict on a request, if nothing but the selection decides it. */
static __always_inline enum verdict selected_verdict(enum selected selected,
						     const struct address *address)
{
	switch (selected) {
	case SELECTED:
		return VERDICT_TRANSLATED;
	case NO_SERVICE:
		return no_service_verdict(address_use(address));
	case NO_ENDPOINT:
		return VERDICT_REFUSED;
	case NO_LOCAL_ENDPOINT:
		return VERDICT_NO_LOCAL_ENDPOINT;
	case SOURCE_DENIED:
		return VERDICT_SOURCE_DENIED;
	case FLOW_KNOWN:
		return VERDICT_ESTABLISHED;
	case SELECT_RECYCLED:
		return VERDICT_RECYCLED;
	default:
		return VERDICT_PASSED;
	}
}

#endif
