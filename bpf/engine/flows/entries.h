/* SPDX-License-Identifier: GPL-2.0 */
/* The contents of a new flow's entries. */
#ifndef EBPFLB_ENGINE_FLOWS_ENTRIES_H
#define EBPFLB_ENGINE_FLOWS_ENTRIES_H

#include "engine/flows/count.h"

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

#endif
