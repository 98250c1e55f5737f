/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A flow is opened: the reply's entry is created first, then the request's, so that no reply comes
 * before it can be translated.
 *
 * Between the hooks, two flows of one client port to one backend through two frontends look alike;
 * the younger flow gets another client port there. So does a backend that connects to itself from
 * the port that it serves, whose requests look like replies.
 */
#ifndef EBPFLB_PATH_FLOW_OPEN_H
#define EBPFLB_PATH_FLOW_OPEN_H

#include "path/flow.h"
#include "path/source_port.h"

enum opened { OPENED, OPENED_WITH_PORT, NO_FREE_PORT, NO_ROOM };

static __always_inline bool tuple_is_loop(const struct tuple *tuple)
{
	return tuple->source_port == tuple->destination_port &&
	       address_equal(&tuple->source, &tuple->destination);
}

/* The request's tuple of the flow that has this entry for its replies. */
static __always_inline struct tuple flow_request_of(const struct tuple *reply_tuple,
						    const struct flow *reply)
{
	struct tuple request = tuple_reverse(reply_tuple, HOOK_INGRESS);

	request.source_port = reply->other_port;
	request.destination = reply->address;
	request.destination_port = reply->port;
	return request;
}

/*
 * Whether a reply's entry that is there may be overwritten: it is the same flow's, which lost its
 * other half to the LRU, or that of a connection which both sides have ended.
 */
static __always_inline bool reply_is_free(const struct flow *reply, const struct tuple *former,
					  const struct tuple *request)
{
	struct flow *requests;

	if (former->source_port == request->source_port &&
	    former->destination_port == request->destination_port &&
	    address_equal(&former->destination, &request->destination))
		return true;
	requests = flow_find(former);
	return flow_is_done(reply->flags, requests ? requests->flags : FLOW_FIN);
}

/* Afterwards the destination of scratch->reply_tuple is the client as the backend's side sees it. */
static __always_inline enum opened reply_create(const struct settings *settings,
						const struct tuple *request,
						struct scratch *scratch)
{
	struct tuple *tuple = &scratch->reply_tuple;
	long failed = tuple_is_loop(tuple) ? -EEXIST : flow_create(tuple, &scratch->reply);
	struct flow *found;

	if (!failed)
		return OPENED;
	if (failed != -EEXIST)
		return NO_ROOM;
	found = flow_find(tuple);
	if (found)
		scratch->former_request = flow_request_of(tuple, found);
	if (found && reply_is_free(found, &scratch->former_request, request)) {
		flow_delete(&scratch->former_request);
		return flow_write(tuple, &scratch->reply) ? NO_ROOM : OPENED;
	}
	for (int i = 0; i < PORT_TRIES; i++) {
		tuple->destination_port = source_port_random(settings);
		if (!flow_create(tuple, &scratch->reply))
			return OPENED_WITH_PORT;
	}
	return NO_FREE_PORT;
}

/* The entry by which egress masquerades the request; without, what a former flow left is deleted. */
static __always_inline bool snat_create(bool masquerade, struct scratch *scratch)
{
	scratch->snat_tuple = tuple_reverse(&scratch->reply_tuple, HOOK_EGRESS);
	if (masquerade)
		return !flow_write(&scratch->snat_tuple, &scratch->snat);
	if (flow_find(&scratch->snat_tuple))
		flow_delete(&scratch->snat_tuple);
	return true;
}

/* What all entries of a flow have in common. */
static __always_inline struct flow flow_entry(const struct backend *backend, __u32 ifindex,
					      __u64 now, enum flow_kind kind)
{
	return (struct flow){ .last_seen = now,
			      .created = now,
			      .service = backend->service,
			      .backend = backend->id,
			      .kind = kind,
			      .ifindex = ifindex };
}

/* Opens the flow of a request's tuple to scratch->selection.backend. */
static __always_inline enum opened flow_open(const struct settings *settings,
					     const struct tuple *request, __u32 ifindex,
					     bool is_direct, bool masquerade,
					     struct scratch *scratch)
{
	const struct backend *backend = &scratch->selection.backend;
	__u64 now = clock_coarse();
	enum opened opened;

	scratch->reply = flow_entry(backend, ifindex, now,
				    is_direct ? FLOW_UN_DIRECT : FLOW_UN_DNAT);
	scratch->reply.address = request->destination;
	scratch->reply.port = request->destination_port;
	scratch->reply.other_port = request->source_port;
	scratch->reply_tuple = tuple_reverse(request, HOOK_EGRESS);
	scratch->reply_tuple.source = backend->address;
	scratch->reply_tuple.source_port = backend->port;
	opened = reply_create(settings, request, scratch);
	if (opened == NO_ROOM || opened == NO_FREE_PORT)
		return opened;

	scratch->request = flow_entry(backend, ifindex, now, is_direct ? FLOW_DIRECT : FLOW_DNAT);
	scratch->request.address = backend->address;
	scratch->request.port = backend->port;
	scratch->request.other_port = scratch->reply_tuple.destination_port;
	scratch->request.flags = FLOW_REQUEST | (masquerade ? FLOW_MASQUERADE : 0) |
				 (request->protocol == UDP ? FLOW_SEEN : 0);
	scratch->snat = flow_entry(backend, ifindex, now, FLOW_SNAT_PENDING);
	scratch->snat.other_port = backend->port;
	scratch->snat.flags = scratch->request.flags;
	if (!snat_create(masquerade, scratch) || flow_write(request, &scratch->request))
		return NO_ROOM;
	return opened;
}

#endif
