/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Gives a flow a port that no other flow to its backend has: the CPU that first creates the reply's
 * entry gets the port. If all ports that are tried are in use, the flow takes over a port: one
 * whose flow has reached its timeout, or else the one that was not used for the longest time.
 */
#ifndef EBPFLB_ENGINE_FLOWS_PORT_H
#define EBPFLB_ENGINE_FLOWS_PORT_H

#include "engine/flows/idle.h"
#include "engine/flows/source_port.h"

enum port { PORT_FOUND, PORT_TAKEN, NO_PORT };

/*
 * Takes over the port of opening->reply_tuple, unless another flow has got it meanwhile. If two
 * CPUs want the same port, the one that creates the claim gets it.
 */
static __always_inline bool port_take(struct opening *opening)
{
	struct tuple *claim = &opening->claim;
	struct flow *reply_entry;
	bool taken = false;

	*claim = opening->reply_tuple;
	claim->hook = HOOK_CLAIM;
	if (flow_create(claim, &opening->reply_entry))
		return false;
	reply_entry = flow_find(&opening->reply_tuple);
	if (reply_entry && reply_entry->created == opening->oldest_created) {
		if (holder_find(reply_entry, opening, HOOK_INGRESS))
			flow_end(&opening->ending);
		flow_delete(&opening->reply_tuple);
		taken = !flow_create(&opening->reply_tuple, &opening->reply_entry);
	}
	flow_delete(claim);
	return taken;
}

/*
 * Creates the replies' entry of a masqueraded flow, opening->reply_entry, for one of
 * opening->ports, which becomes the destination port of opening->reply_tuple. `opening` holds the
 * values that the verifier does not need to track from one try to the next.
 */
static __always_inline enum port port_create(const struct settings *settings,
					     struct opening *opening)
{
	struct tuple *tuple = &opening->reply_tuple;
	__u64 sum = sum_without_ports(tuple, &opening->reply_entry), held_since;

	opening->oldest = PORT_KEPT;
	for (int i = 0; i < PORT_TRIES; i++) {
		flow_name_port(tuple, &opening->reply_entry, sum, port_next(&opening->ports));
		if (!flow_create_named(tuple, &opening->reply_entry))
			return PORT_FOUND;
		held_since = port_held_since(settings, opening, HOOK_INGRESS);
		if (held_since < opening->oldest) {
			opening->oldest = held_since;
			opening->oldest_created = opening->holder_created;
			opening->oldest_port = tuple->destination_port;
		}
		if (held_since == PORT_IDLE)
			break;
	}
	tuple->destination_port = opening->oldest_port;
	if (opening->oldest == PORT_KEPT || !port_take(opening))
		return NO_PORT;
	return opening->oldest == PORT_IDLE ? PORT_FOUND : PORT_TAKEN;
}

#endif
