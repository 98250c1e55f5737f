/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A direct connection: to a backend itself, from a client port that already has a flow to the same
 * backend through a frontend. Between the hooks the two would look alike, so the direct connection
 * gets another client port there. (UDP is left out: every datagram would have to be looked
 * at. Its replies go to the flow through the frontend.)
 */
#ifndef EBPFLB_ENGINE_FLOWS_DIRECT_H
#define EBPFLB_ENGINE_FLOWS_DIRECT_H

#include "engine/flows/table.h"

/*
 * Whether an entry belongs to a direct connection that came in at another device. Between a bridge
 * and its port, packets of one of the two connections look like those of the other, so a direct
 * connection is translated only at the client's device.
 */
static __always_inline bool direct_is_at_other_device(const struct flow *flow, __u32 ifindex)
{
	return (flow->kind == FLOW_DIRECT || flow->kind == FLOW_UN_DIRECT) &&
	       flow->ifindex != ifindex;
}

/* Whether a packet opens a direct connection; the destination itself is taken as the backend. */
static __always_inline bool direct_select(const struct tuple *tuple, __u32 ifindex,
					  struct scratch *scratch)
{
	struct flow *reply_entry;

	if (tuple->protocol == UDP)
		return false;
	scratch->reply_tuple = tuple_reverse(tuple, HOOK_EGRESS);
	reply_entry = flow_find(&scratch->reply_tuple);
	if (!reply_entry || reply_entry->ifindex != ifindex)
		return false;
	scratch->selection.backend = (struct backend){ .address = tuple->destination,
						       .port = tuple->destination_port };
	return true;
}

#endif
