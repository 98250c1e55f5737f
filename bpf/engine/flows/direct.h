/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Direct connections: to a backend itself, from a client port that already has a flow to the same
 * backend through a frontend. Between the hooks the two would look alike, so the direct connection
 * gets another client port there, like from the kernel's NAT. A bridge may pass its packets on beside
 * the stack (packet->is_bridged).
 */
#ifndef EBPFLB_ENGINE_FLOWS_DIRECT_H
#define EBPFLB_ENGINE_FLOWS_DIRECT_H

#include "engine/flows/gate.h"
#include "engine/flows/table.h"

/*
 * Whether an entry must not be applied at this device. Between a bridge and its port, the packets of
 * two flows look alike: of the direct connection, and of the one through the service. Packets of the
 * direct connection are therefore translated at the client's device alone. A resting port's entry
 * translates nothing: the stack answers late packets of the closed flow.
 */
static __always_inline bool entry_is_not_for(const struct flow *flow, __u32 ifindex)
{
	return flow->kind >= FLOW_DIRECT &&
	       (flow->kind == FLOW_RESTING || flow->ifindex != ifindex);
}

/* Whether a packet opens a direct connection. Its destination is then the backend. */
static __always_inline bool direct_select(const struct tuple *tuple, __u32 ifindex,
					  struct opening *opening)
{
	struct flow *reply_entry;

	if (!flows_may_exist())
		return false;
	opening->reply_tuple = tuple_reverse(tuple, HOOK_EGRESS);
	reply_entry = flow_find(&opening->reply_tuple);
	if (!reply_entry || reply_entry->ifindex != ifindex)
		return false;
	opening->selection.backend = (struct backend){ .address = tuple->destination,
						       .port = tuple->destination_port };
	return true;
}

#endif
