/* SPDX-License-Identifier: GPL-2.0 */
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
#ifndef EBPFLB_ENGINE_FLOWS_HALF_OPEN_H
#define EBPFLB_ENGINE_FLOWS_HALF_OPEN_H

#include "engine/flows/close.h"

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

#endif
