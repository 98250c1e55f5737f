/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Decides which backend a request gets, the same for sockets and packets:
 *
 *   frontend -> service; packets that rules in raw exempt, or that a socket hook has translated
 *   already; source ranges; the backend that a datagram
 *   socket has; for sockets the node-local listener; traffic policy; session affinity; else one
 *   backend picked by number
 *   (kube-proxy.md 4, 7, 9, 11.1)
 *
 * The caller decides how to use the backend: path/socket.h gives it to the socket, path/ingress.h
 * leaves the packet to netfilter, or opens a flow.
 */
#ifndef EBPFLB_PATH_SELECT_BACKEND_H
#define EBPFLB_PATH_SELECT_BACKEND_H

#include "core/counters.h"
#include "rules/affinity.h"
#include "rules/frontend.h"
#include "rules/scheduler.h"
#include "rules/selected.h"
#include "sockets/datagram.h"

/* Source ranges. The address of a pod's socket is unknown until its packets leave. */
enum admission { ADMITTED, DENIED, CLIENT_UNKNOWN };

static __always_inline enum admission select_admission(const struct request *request,
						       const struct service *service)
{
	const struct address *client;

	if (!(service->flags & SERVICE_RESTRICTED))
		return ADMITTED;
	client = client_address(request);
	if (!client) {
		record(STEP_CLIENT_UNKNOWN, 0);
		return CLIENT_UNKNOWN;
	}
	record_at(STEP_ADMISSION, policy_admits(service, client), client);
	return policy_admits(service, client) ? ADMITTED : DENIED;
}

/* Returns the backends that the traffic policy allows to the client; sets `list`. */
static __always_inline struct range select_range(const struct request *request,
						 struct selection *selection, __u16 *list)
{
	const struct service *service = &selection->service;
	bool is_local_client = client_is_local(request);
	bool local_only = policy_is_local_only(service, is_local_client);

	record(STEP_POLICY, local_only * STEP_LOCAL_ONLY | is_local_client * STEP_LOCAL_CLIENT);
	selection->is_local_client = is_local_client;
	*list = local_only ? BACKEND_LOCAL : BACKEND_CLUSTER;
	return local_only ? service->local : service->cluster;
}

/*
 * The listener of this node that serves all sockets' requests, whatever the policies, as long as it
 * answers: its slot is the block's last one (ebpflb/agent/node_local.py).
 */
static __always_inline enum selected select_node_local(struct selection *selection)
{
	const struct service *service = &selection->service;
	__u32 slot = service->cluster.base + service->slots - 1;

	record(STEP_NODE_LOCAL, slot);
	if (!backend_read(slot, service->id, &selection->backend))
		return SELECT_RECYCLED;
	service_count_chosen(service->id, false);
	return SELECTED;
}

/* The client gets no backend here; with SERVICE_PASSTHROUGH perhaps elsewhere. */
static __always_inline enum selected select_none(const struct request *request,
						 const struct service *service)
{
	bool has_endpoints = service->flags & SERVICE_ENDPOINTS;

	if (service->flags & SERVICE_PASSTHROUGH) {
		record(STEP_PASSTHROUGH, 0);
		return PASSED_THROUGH;
	}
	if (!request->in_middle)
		service_count_no_backend(service->id, has_endpoints);
	return has_endpoints ? NO_LOCAL_ENDPOINT : NO_ENDPOINT;
}

/* Reads the backend that the scheduler draws for a new connection. A socket's will be counted. */
static __always_inline bool backend_draw(const struct request *request, struct selection *selection,
					 __u32 place, const struct range *range, __u16 list)
{
	const struct service *service = &selection->service;
	__u32 slot = scheduler_slot(request, service, range, list);

	if (!request->tuple)
		place_expect(place, slot - service->cluster.base);
	return backend_read(slot, service->id, &selection->backend);
}

/* By affinity, or by the scheduler, in a list that is not empty. */
static __always_inline enum selected select_listed(const struct request *request,
						   struct selection *selection,
						   __u32 place, const struct range *range,
						   __u16 list)
{
	const struct service *service = &selection->service;
	struct affinity_key key = affinity_key_of(request, service);
	bool by_affinity;

	table_spare(request, &selection->service);
	by_affinity = affinity_find(&key, list, request->tuple, selection);
	if (!by_affinity && !backend_draw(request, selection, place, range, list))
		return SELECT_RECYCLED;
	if (!by_affinity && service->affinity_seconds && !request->in_middle)
		affinity_remember(&key, selection->backend.id, request->tuple);
	if (!request->in_middle)
		service_count_chosen(service->id, by_affinity);
	return SELECTED;
}

/* Whether rules in raw exempt the request's packet. */
static __always_inline bool request_is_exempt(const struct request *request,
					      const struct service *service)
{
	if (!request->tuple || !(service->flags & SERVICE_UNTRACKED))
		return false;
	record(STEP_UNTRACKED, 0);
	return true;
}

/* Makes the decision, from top to bottom; again without the copies of services. */
static __always_inline enum selected select_once(const struct request *request,
						 struct selection *selection, bool again)
{
	const struct service *service = &selection->service;
	struct backend *backend = &selection->backend;
	__u32 place = NO_PLACE;
	enum found found = service_find(request->frontend, request->netns, &selection->service,
					again ? NULL : &place);
	enum admission admission;
	struct range range;
	__u16 list;

	if (found != FOUND)
		return found == ABSENT ? NO_SERVICE : SELECT_RECYCLED;
	if (request_is_exempt(request, service))
		return EXEMPT;
	if (request->is_translated && service->flags & SERVICE_EXTERNAL)
		return AT_SOCKET;
	admission = select_admission(request, service);
	if (admission != ADMITTED)
		return admission == DENIED ? SOURCE_DENIED : LEFT_TO_PACKETS;
	selection->is_assigned = !request->tuple && request->frontend->protocol == UDP &&
				 assignment_find(request, service->id, backend);
	if (selection->is_assigned)
		return SELECTED;
	if (!request->tuple && service->flags & SERVICE_NODE_LOCAL)
		return select_node_local(selection);
	range = select_range(request, selection, &list);
	return range.size ? select_listed(request, selection, place, &range, list)
			  : select_none(request, service);
}

/*
 * Whether a service may have the frontend; for a packet ingress has already checked this. Nearly all
 * cluster IPs have one, so the bits of no_frontends would be one more cache miss there.
 */
static __always_inline bool service_may_exist(const struct request *request)
{
	return request->tuple || address_may_have_use(&request->frontend->address) ||
	       frontend_may_exist(request->frontend);
}

/*
 * Selects a backend. If a map element was recycled while it was read, everything is looked up
 * again, once. There is no loop: clang would compile it into one that is entered in its middle,
 * which the verifiers of 5.10 and 6.1 reject (back-edge).
 */
static __always_inline enum selected select_backend(const struct request *request,
						    struct selection *selection)
{
	enum selected selected = NO_SERVICE;

	if (service_may_exist(request))
		selected = select_once(request, selection, false);
	if (selected == SELECT_RECYCLED) {
		verdict_count(VERDICT_RETRIED);
		selected = select_once(request, selection, true);
	}
	return selected == NO_SERVICE ? selected_without_service(&request->frontend->address)
				      : selected;
}

#endif
