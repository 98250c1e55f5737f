/* SPDX-License-Identifier: GPL-2.0 */
/* What the entries of a new flow contain. */
#ifndef EBPFLB_ENGINE_FLOWS_ENTRIES_H
#define EBPFLB_ENGINE_FLOWS_ENTRIES_H

#include "engine/flows/count.h"

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

/* The three entries of a flow to the backend that was selected, before their addresses are known. */
static __always_inline void entries_begin(struct scratch *scratch, __u32 ifindex, __u64 now,
					  bool is_direct)
{
	const struct backend *backend = &scratch->selection.backend;

	scratch->reply_entry = flow_entry(backend, ifindex, now,
					  is_direct ? FLOW_UN_DIRECT : FLOW_UN_DNAT);
	scratch->request_entry = flow_entry(backend, ifindex, now,
					    is_direct ? FLOW_DIRECT : FLOW_DNAT);
	scratch->snat_entry = flow_entry(backend, ifindex, now, FLOW_SNAT_PENDING);
	scratch->request_entry.connection = flow_number(&scratch->selection, is_direct);
	scratch->reply_entry.connection = scratch->request_entry.connection;
}

/* Replies to a request: their tuple as long as the client keeps its port, and their entry. */
static __always_inline void reply_prepare(const struct tuple *request_tuple,
					  struct scratch *scratch)
{
	scratch->reply_entry.address = request_tuple->destination;
	scratch->reply_entry.port = request_tuple->destination_port;
	scratch->reply_entry.other_port = request_tuple->source_port;
	scratch->reply_tuple = tuple_reverse(request_tuple, HOOK_EGRESS);
	scratch->reply_tuple.source = scratch->selection.backend.address;
	scratch->reply_tuple.source_port = scratch->selection.backend.port;
}

#endif
