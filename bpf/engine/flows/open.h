/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Opens a flow: the reply's entry is created first, then the request's, so that no reply comes
 * before it can be translated.
 *
 * Between the hooks, two flows of one client port to one backend through two frontends look alike;
 * the newer flow gets another client port there. So does a backend that connects to itself from its
 * own port: its requests look like replies.
 */
#ifndef EBPFLB_ENGINE_FLOWS_OPEN_H
#define EBPFLB_ENGINE_FLOWS_OPEN_H

#include "engine/flows/entries.h"
#include "engine/flows/half_open.h"
#include "engine/flows/port.h"

enum opened { OPENED, OPENED_WITH_PORT, NO_FREE_PORT, MAP_FULL };

static __always_inline bool tuple_is_loop(const struct tuple *tuple)
{
	return tuple->source_port == tuple->destination_port &&
	       address_equal(&tuple->source, &tuple->destination);
}

/*
 * Whether the entry that a reply's tuple already has may be overwritten: it belongs to the same
 * flow, whose request's entry the LRU evicted, or to a connection that has ended. A former flow
 * without a request's entry counts as closed by its client.
 */
static __always_inline bool reply_may_be_replaced(const struct flow *reply_entry,
						  const struct tuple *former_tuple,
						  const struct tuple *request_tuple)
{
	struct flow *request_entry;

	if (former_tuple->source_port == request_tuple->source_port &&
	    former_tuple->destination_port == request_tuple->destination_port &&
	    address_equal(&former_tuple->destination, &request_tuple->destination))
		return true;
	request_entry = flow_find(former_tuple);
	return flow_has_ended(reply_entry->flags, request_entry ? request_entry->flags : FLOW_FIN);
}

/*
 * Another port for the client. If none of those tried is free, the last one is taken over, unless
 * its flow is open: no other client is concerned.
 */
static __always_inline enum opened reply_create_with_port(const struct settings *settings,
							  const struct tuple *request_tuple,
							  struct scratch *scratch)
{
	struct source_ports ports = source_ports_for(settings, request_tuple->source_port);

	for (int i = 0; i < PORT_TRIES; i++) {
		scratch->reply_tuple.destination_port = source_port_random(ports);
		if (!flow_create(&scratch->reply_tuple, &scratch->reply_entry))
			return OPENED_WITH_PORT;
	}
	if (port_held_since(settings, scratch, HOOK_EGRESS) == PORT_KEPT)
		return NO_FREE_PORT;
	flow_delete(&scratch->ending.between);
	flow_delete(&scratch->reply_tuple);
	return flow_create(&scratch->reply_tuple, &scratch->reply_entry) ? NO_FREE_PORT
									: OPENED_WITH_PORT;
}

/*
 * On success the destination of reply_tuple is the client between the hooks (maybe with another
 * port).
 */
static __always_inline enum opened reply_create(const struct settings *settings,
						const struct tuple *request_tuple,
						struct scratch *scratch)
{
	struct tuple *tuple = &scratch->reply_tuple;
	long failed = tuple_is_loop(tuple) ? -EEXIST : flow_create(tuple, &scratch->reply_entry);
	struct flow *found;

	if (!failed)
		return OPENED;
	if (failed != -EEXIST)
		return MAP_FULL;
	found = flow_find(tuple);
	if (found)
		scratch->former_request_tuple = request_tuple_of(tuple, found);
	if (found && found->kind != FLOW_RESTING &&
	    reply_may_be_replaced(found, &scratch->former_request_tuple, request_tuple)) {
		flow_delete(&scratch->former_request_tuple);
		return flow_write(tuple, &scratch->reply_entry) ? MAP_FULL : OPENED;
	}
	return reply_create_with_port(settings, request_tuple, scratch);
}

/*
 * The entry by which egress masquerades the request. Those of a former flow are deleted, also if it
 * was masqueraded and this one is not: an un-SNAT entry that stayed would count as a flow of its own.
 */
static __always_inline bool snat_create(bool masquerade, struct scratch *scratch)
{
	scratch->snat_tuple = tuple_reverse(&scratch->reply_tuple, HOOK_EGRESS);
	if (flow_find(&scratch->snat_tuple))
		snat_close(&scratch->snat_tuple, true);
	return !masquerade || !flow_write(&scratch->snat_tuple, &scratch->snat_entry);
}

/* Opens a flow from a request's tuple to scratch->selection.backend. */
static __always_inline enum opened flow_open(const struct settings *settings,
					     const struct tuple *request_tuple, __u32 ifindex,
					     bool is_direct, bool masquerade,
					     struct scratch *scratch)
{
	const struct backend *backend = &scratch->selection.backend;
	__u16 flags = FLOW_REQUEST | (masquerade ? FLOW_MASQUERADE : 0);
	__u16 affinity = scratch->selection.is_pending && !is_direct ? FLOW_AFFINITY : 0;
	__u64 now = clock_coarse();
	enum opened opened;

	scratch->reply_entry = flow_entry(backend, ifindex, now,
					  is_direct ? FLOW_UN_DIRECT : FLOW_UN_DNAT);
	scratch->request_entry = flow_entry(backend, ifindex, now,
					    is_direct ? FLOW_DIRECT : FLOW_DNAT);
	scratch->snat_entry = flow_entry(backend, ifindex, now, FLOW_SNAT_PENDING);
	if (request_tuple->protocol == UDP) {
		flags |= FLOW_SEEN;
		scratch->reply_entry.flags = affinity;
		affinity = 0;
	}
	reply_prepare(request_tuple, scratch);
	opened = reply_create(settings, request_tuple, scratch);
	if (opened == MAP_FULL || opened == NO_FREE_PORT)
		return opened;

	scratch->request_entry.address = backend->address;
	scratch->request_entry.port = backend->port;
	scratch->request_entry.other_port = scratch->reply_tuple.destination_port;
	scratch->request_entry.flags = flags | affinity;
	scratch->snat_entry.other_port = backend->port;
	scratch->snat_entry.flags = flags;
	if (!snat_create(masquerade, scratch) || flow_write(request_tuple, &scratch->request_entry))
		return MAP_FULL;
	half_open_note(request_tuple, &scratch->reply_tuple, now);
	return opened;
}

#endif
