/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Opens a flow: the reply's entry is created before the request's, so that every reply can be
 * translated.
 *
 * Between the hooks, two flows from one client port to one backend through two frontends look
 * alike: the newer one gets another client port there. The same applies to a backend that connects
 * to itself from its own port.
 */
#ifndef EBPFLB_ENGINE_FLOWS_OPEN_H
#define EBPFLB_ENGINE_FLOWS_OPEN_H

#include "engine/flows/close.h"
#include "engine/flows/count.h"
#include "engine/flows/gate.h"
#include "engine/flows/port.h"
#include "engine/flows/window.h"

/* The contents of a new flow's entries. */

/* Returns the part that all entries of a flow have in common. */
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

/* Prepares a flow's three entries, before the addresses are known. */
static __always_inline void entries_begin(struct opening *opening, __u32 ifindex, __u64 now,
					  bool is_direct)
{
	const struct backend *backend = &opening->selection.backend;

	opening->reply_entry = flow_entry(backend, ifindex, now,
					  is_direct ? FLOW_UN_DIRECT : FLOW_UN_DNAT);
	opening->request_entry = flow_entry(backend, ifindex, now,
					    is_direct ? FLOW_DIRECT : FLOW_DNAT);
	opening->snat_entry = flow_entry(backend, ifindex, now, FLOW_SNAT_PENDING);
	opening->request_entry.connection = flow_number(&opening->selection, is_direct);
	opening->reply_entry.connection = opening->request_entry.connection;
}

/* Prepares the replies' entry, and their tuple for the case that the client keeps its port. */
static __always_inline void reply_prepare(const struct tuple *request_tuple,
					  struct opening *opening)
{
	opening->reply_entry.address = request_tuple->destination;
	opening->reply_entry.port = request_tuple->destination_port;
	opening->reply_entry.other_port = request_tuple->source_port;
	opening->reply_tuple = tuple_reverse(request_tuple, HOOK_EGRESS);
	opening->reply_tuple.source = opening->selection.backend.address;
	opening->reply_tuple.source_port = opening->selection.backend.port;
}

/*
 * A flow is half-open until both ends have been heard: with TCP and SCTP until the client has
 * answered the backend, with UDP until the backend has replied. The sources of half-open flows may
 * be forged, so their number is limited: every new flow takes a place in the map half_open, and the
 * flow that had this place is deleted if it is still half-open. The maps of flows have space for
 * all half-open flows, so a flood of them evicts no other flows.
 *
 * A second map of flows would also work, but every packet without a flow would cost a look-up in
 * it. And while an entry moves from one map to the other, a packet on another CPU could find it in
 * neither.
 */

#define HALF_OPEN_TRIES 4	/* random places: the oldest flow among them loses its place */

static __always_inline bool flow_is_half_open(const struct ending *ending,
					      const struct flow *request_entry)
{
	struct flow *reply_entry;

	if (ending->request_tuple.protocol != UDP)
		return !(request_entry->flags & FLOW_SEEN);
	reply_entry = flow_find(&ending->reply_tuple);
	return reply_entry && !(reply_entry->flags & FLOW_SEEN);
}

/*
 * Deletes the flow that has this place, if it is half-open and no newer flow has its tuple. Calling
 * flow_close would cost the verifier three times as much: here the tuples are in a map, so paths
 * that differ only in tuples are verified once. Two CPUs may fill a place at once: then it contains
 * the requests of one flow and the replies of another.
 */
static __always_inline void half_open_displace(const struct half_open *place,
					       struct opening *opening)
{
	struct flow_counters *counters = flow_counters_of(&place->request);
	struct ending *ending = &opening->ending;
	struct flow *found, *request_entry = &opening->other;
	__u64 created = place->created;

	ending->request_tuple = place->request;
	ending->reply_tuple = place->reply;
	barrier();	/* from here on the place is not read */
	found = flow_find(&ending->request_tuple);
	if (!found || !flow_copy(request_entry, &ending->request_tuple, found) ||
	    request_entry->created != created || !flow_is_half_open(ending, request_entry) ||
	    !request_leads_to(&ending->request_tuple, request_entry, &ending->reply_tuple,
			      HOOK_INGRESS))
		return;
	flow_delete(&ending->reply_tuple);
	if (request_entry->flags & FLOW_MASQUERADE) {
		tuple_write_reverse(&ending->between, &ending->reply_tuple, HOOK_EGRESS);
		snat_close(&ending->between, false, NULL);
	}
	flow_delete(&ending->request_tuple);
	flow_uncount(request_entry->connection);
	if (counters)
		counters->displaced += 1;
}

static __always_inline struct half_open *half_open_place(__u8 protocol)
{
	__u32 first = protocol == TCP ? 0 : HALF_OPEN_FLOWS;
	struct half_open *oldest = NULL, *place;

	UNROLL
	for (int i = 0; i < HALF_OPEN_TRIES; i++) {
		place = LOOKUP_NUMBER(struct half_open, half_open,
				first + bpf_get_prandom_u32() % HALF_OPEN_FLOWS);
		if (place && (!oldest || place->created < oldest->created))
			oldest = place;
	}
	return oldest;
}

/* Gives a new flow a place. Call it for every new flow. */
static __always_inline void half_open_note(const struct tuple *request_tuple,
					   struct opening *opening, __u64 created)
{
	struct half_open *place = half_open_place(request_tuple->protocol);

	if (!place)
		return;
	if (place->created)
		half_open_displace(place, opening);
	place->request = *request_tuple;
	place->reply = opening->reply_tuple;
	place->created = created;
}

#define AT_ONCE SECOND	/* two packets of a flow that meet no entry of it */

enum opened { OPENED, OPENED_WITH_PORT, NO_FREE_PORT, MAP_FULL };

/* Whether the existing entry of a reply's tuple, of which opening->other is a copy, is this flow's. */
static __always_inline bool reply_is_own(const struct opening *opening,
					 const struct tuple *request_tuple)
{
	const struct tuple *former_tuple = &opening->former_request_tuple;

	return former_tuple->source_port == request_tuple->source_port &&
	       former_tuple->destination_port == request_tuple->destination_port &&
	       address_equal(&former_tuple->destination, &request_tuple->destination);
}

/*
 * Whether another datagram of this flow is opening it, on another CPU: that one has written the reply's
 * entry, and the request's not yet when this one looked for it. Then both write the same entries: as
 * one flow, if they are created at the same time.
 */
static __always_inline bool flow_join(const struct tuple *request_tuple, struct opening *opening)
{
	const struct flow *other = &opening->other;

	if (request_tuple->protocol != UDP || !reply_is_own(opening, request_tuple) ||
	    other->backend != opening->reply_entry.backend ||
	    opening->reply_entry.created >= other->created + AT_ONCE)
		return false;
	opening->request_entry.created = opening->snat_entry.created = other->created;
	opening->request_entry.connection = other->connection;
	return true;
}

/*
 * Whether the existing entry of a reply's tuple may be overwritten: it belongs to the same flow,
 * whose request's entry the LRU evicted, or to a connection that has ended. A former flow without a
 * request's entry counts as closed by its client.
 */
static __always_inline bool reply_may_be_replaced(const struct opening *opening,
						  const struct tuple *request_tuple)
{
	const struct flow *reply_entry = &opening->other;
	struct flow *request_entry;

	if (reply_is_own(opening, request_tuple))
		return true;
	request_entry = flow_find(&opening->former_request_tuple);
	return flow_has_ended(reply_entry->flags, request_entry ? request_entry->flags : FLOW_FIN);
}

/*
 * Creates the reply's entry with another client port. If all ports that it tries are in use, it
 * takes over the last one, unless its flow is open. This concerns no other client.
 */
static __always_inline enum opened reply_create_with_port(const struct settings *settings,
							  const struct tuple *request_tuple,
							  struct opening *opening)
{
	struct port_sequence ports = port_sequence_for(settings, request_tuple->source_port);
	struct tuple *tuple = &opening->reply_tuple;
	__u64 sum = sum_without_ports(tuple, &opening->reply_entry);

	for (int i = 0; i < PORT_TRIES; i++) {
		flow_name_port(tuple, &opening->reply_entry, sum, port_next(&ports));
		if (!flow_create_named(tuple, &opening->reply_entry))
			return OPENED_WITH_PORT;
	}
	if (port_held_since(settings, opening, HOOK_EGRESS) == PORT_KEPT)
		return NO_FREE_PORT;
	flow_delete(&opening->ending.between);
	flow_delete(tuple);
	flow_uncount(opening->holder_connection);
	return flow_create_named(tuple, &opening->reply_entry) ? NO_FREE_PORT : OPENED_WITH_PORT;
}

/*
 * Creates the reply's entry. On success the destination of reply_tuple is the client between the
 * hooks.
 */
static __always_inline enum opened reply_create(const struct settings *settings,
						const struct tuple *request_tuple,
						struct opening *opening)
{
	struct tuple *tuple = &opening->reply_tuple;
	long failed = tuple_is_loop(tuple) ? -EEXIST : flow_create(tuple, &opening->reply_entry);
	struct flow *found;

	if (!failed)
		return OPENED;
	if (failed != -EEXIST)
		return MAP_FULL;
	found = flow_find(tuple);
	if (!found || !flow_copy(&opening->other, tuple, found))
		return reply_create_with_port(settings, request_tuple, opening);
	request_tuple_write(&opening->former_request_tuple, tuple, &opening->other);
	if (opening->other.kind != FLOW_RESTING && flow_join(request_tuple, opening))
		return OPENED;
	if (opening->other.kind != FLOW_RESTING && reply_may_be_replaced(opening, request_tuple)) {
		flow_delete(&opening->former_request_tuple);
		flow_uncount(opening->other.connection);
		return flow_write(tuple, &opening->reply_entry) ? MAP_FULL : OPENED;
	}
	return reply_create_with_port(settings, request_tuple, opening);
}

/*
 * Creates the entry by which egress masquerades the request. It deletes the entries of a former
 * flow, even if only that flow was masqueraded: a remaining un-SNAT entry would count as a flow.
 */
static __always_inline bool snat_create(struct opening *opening)
{
	struct flow *found;
	long failed;

	opening->snat_tuple = tuple_reverse(&opening->reply_tuple, HOOK_EGRESS);
	found = flow_find(&opening->snat_tuple);
	if (found && found->created == opening->snat_entry.created)
		return true;	/* flow_join */
	if (found)
		snat_close(&opening->snat_tuple, true, &opening->other);
	if (!(opening->snat_entry.flags & FLOW_MASQUERADE))
		return true;
	failed = flow_create(&opening->snat_tuple, &opening->snat_entry);
	return !failed || failed == -EEXIST;
}

/*
 * Opens a flow with a request to opening->selection.backend. From here on the kind of flow is read
 * from the entries: otherwise the verifier would follow each search for a port once for each kind.
 */
static __always_inline enum opened flow_open(const struct settings *settings,
					     const struct packet *packet, __u32 ifindex,
					     bool is_direct, bool masquerade,
					     struct opening *opening)
{
	const struct backend *backend = &opening->selection.backend;
	const struct tuple *request_tuple = &packet->tuple;
	__u16 flags = FLOW_REQUEST | (masquerade ? FLOW_MASQUERADE : 0);
	__u16 affinity = opening->selection.is_pending && !is_direct ? FLOW_AFFINITY : 0;
	__u64 now = clock_coarse();
	enum opened opened;

	gate_open();
	entries_begin(opening, ifindex, now, is_direct);
	if (request_tuple->protocol == UDP) {
		flags |= FLOW_SEEN;
		opening->reply_entry.flags = affinity;
		affinity = 0;
	}
	opening->request_entry.flags = flags | affinity;
	opening->snat_entry.flags = flags;
	reply_prepare(request_tuple, opening);
	opened = reply_create(settings, request_tuple, opening);
	if (opened == MAP_FULL || opened == NO_FREE_PORT)
		return opened;
	opening->request_entry.address = backend->address;
	opening->request_entry.port = backend->port;
	opening->request_entry.other_port = opening->reply_tuple.destination_port;
	side_begin(&opening->request_entry, packet);
	opening->snat_entry.other_port = backend->port;
	flow_count(opening->request_entry.connection, backend->id);
	if (!snat_create(opening) || flow_write(request_tuple, &opening->request_entry)) {
		flow_uncount(opening->request_entry.connection);
		return MAP_FULL;
	}
	half_open_note(request_tuple, opening, opening->request_entry.created);
	return opened;
}

#endif
