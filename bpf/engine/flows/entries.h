/* SPDX-License-Identifier: GPL-2.0 */
/* What the entries of a new flow contain. */
#ifndef EBPFLB_ENGINE_FLOWS_ENTRIES_H
#define EBPFLB_ENGINE_FLOWS_ENTRIES_H

#include "engine/flows/table.h"

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
