/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Opens a flow: the reply's entry is created first, then the request's, so that no reply comes
 * before it can be translated.
 *
 * Between the hooks, two flows of one client port to one backend through two frontends look alike:
 * the newer gets another client port there. So does a backend that connects to itself from its port.
 */
#ifndef EBPFLB_ENGINE_FLOWS_OPEN_H
#define EBPFLB_ENGINE_FLOWS_OPEN_H

#include "engine/flows/association.h"
#include "engine/flows/entries.h"
#include "engine/flows/gate.h"
#include "engine/flows/half_open.h"
#include "engine/flows/port.h"

enum opened { OPENED, OPENED_WITH_PORT, NO_FREE_PORT, MAP_FULL };

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
	struct port_sequence ports = port_sequence_for(settings, request_tuple->source_port);
	struct tuple *tuple = &scratch->reply_tuple;
	__u64 sum = sum_without_ports(tuple, &scratch->reply_entry);

	for (int i = 0; i < PORT_TRIES; i++) {
		flow_name_port(tuple, &scratch->reply_entry, sum, port_next(&ports));
		if (!flow_create_named(tuple, &scratch->reply_entry))
			return OPENED_WITH_PORT;
	}
	if (port_held_since(settings, scratch, HOOK_EGRESS) == PORT_KEPT)
		return NO_FREE_PORT;
	flow_delete(&scratch->ending.between);
	flow_delete(tuple);
	flow_uncount(scratch->holder_connection);
	return flow_create_named(tuple, &scratch->reply_entry) ? NO_FREE_PORT : OPENED_WITH_PORT;
}

/*
 * On success the destination of reply_tuple is the client between the hooks.
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
	if (!found || !flow_copy(&scratch->known, tuple, found))
		return reply_create_with_port(settings, request_tuple, scratch);
	scratch->former_request_tuple = request_tuple_of(tuple, &scratch->known);
	if (scratch->known.kind != FLOW_RESTING &&
	    reply_may_be_replaced(&scratch->known, &scratch->former_request_tuple, request_tuple)) {
		flow_delete(&scratch->former_request_tuple);
		flow_uncount(scratch->known.connection);
		return flow_write(tuple, &scratch->reply_entry) ? MAP_FULL : OPENED;
	}
	return reply_create_with_port(settings, request_tuple, scratch);
}

/*
 * The entry by which egress masquerades the request. Those of a former flow are deleted, also if it
 * was masqueraded and this one is not: an un-SNAT entry that stayed would count as a flow of its own.
 */
static __always_inline bool snat_create(struct scratch *scratch)
{
	scratch->snat_tuple = tuple_reverse(&scratch->reply_tuple, HOOK_EGRESS);
	if (flow_find(&scratch->snat_tuple))
		snat_close(&scratch->snat_tuple, true);
	return !(scratch->snat_entry.flags & FLOW_MASQUERADE) ||
	       !flow_write(&scratch->snat_tuple, &scratch->snat_entry);
}

/*
 * Opens a flow with a request to scratch->selection.backend. What kind of flow it is stands in the
 * entries from then on: the verifier would follow each search for a port once for each kind.
 */
static __always_inline enum opened flow_open(struct __sk_buff *ctx, const struct settings *settings,
					     const struct packet *packet, bool is_direct,
					     bool masquerade, struct scratch *scratch)
{
	const struct backend *backend = &scratch->selection.backend;
	const struct tuple *request_tuple = &packet->tuple;
	__u16 flags = FLOW_REQUEST | (masquerade ? FLOW_MASQUERADE : 0);
	__u16 affinity = scratch->selection.is_pending && !is_direct ? FLOW_AFFINITY : 0;
	__u64 now = clock_coarse();
	enum opened opened;

	gate_open();
	entries_begin(scratch, ctx->ifindex, now, is_direct);
	if (request_tuple->protocol == UDP) {
		flags |= FLOW_SEEN;
		scratch->reply_entry.flags = affinity;
		affinity = 0;
	}
	scratch->request_entry.flags = flags | affinity;
	scratch->snat_entry.flags = flags;
	reply_prepare(request_tuple, scratch);
	opened = reply_create(settings, request_tuple, scratch);
	if (opened == MAP_FULL || opened == NO_FREE_PORT)
		return opened;
	scratch->request_entry.address = backend->address;
	scratch->request_entry.port = backend->port;
	scratch->request_entry.other_port = scratch->reply_tuple.destination_port;
	side_begin(&scratch->request_entry, packet);
	scratch->snat_entry.other_port = backend->port;
	flow_count(scratch->request_entry.connection, backend->id);
	if (!snat_create(scratch) || flow_write(request_tuple, &scratch->request_entry)) {
		flow_uncount(scratch->request_entry.connection);
		return MAP_FULL;
	}
	half_open_note(request_tuple, scratch, now);
	return opened;
}

#endif
