/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Gives a flow a port that no other flow to its backend has: the CPU that creates the reply's entry
 * first gets the port. If it is in use, it is taken over from a flow that has been idle for its
 * time; if none of those tried is, from the one that was used least lately.
 */
#ifndef EBPFLB_ENGINE_FLOWS_PORT_H
#define EBPFLB_ENGINE_FLOWS_PORT_H

#include "engine/flows/idle.h"
#include "engine/flows/source_port.h"

enum port { PORT_FOUND, PORT_TAKEN, NO_PORT };

/*
 * Takes over the port of scratch->reply_tuple, unless another flow has got it meanwhile. Two CPUs
 * may want the same port: the one that creates the claim gets it.
 */
static __always_inline bool port_take(struct scratch *scratch)
{
	struct tuple *claim = &scratch->claim;
	struct flow *reply_entry;
	bool taken = false;

	*claim = scratch->reply_tuple;
	claim->hook = HOOK_CLAIM;
	if (flow_create(claim, &scratch->reply_entry))
		return false;
	reply_entry = flow_find(&scratch->reply_tuple);
	if (reply_entry && reply_entry->created == scratch->oldest_created) {
		if (holder_find(reply_entry, scratch, HOOK_INGRESS))
			flow_end(&scratch->ending);
		flow_delete(&scratch->reply_tuple);
		taken = !flow_create(&scratch->reply_tuple, &scratch->reply_entry);
	}
	flow_delete(claim);
	return taken;
}

/*
 * Creates the entry of a masqueraded flow's replies, scratch->reply_entry, for one of scratch->ports,
 * which becomes the destination port of scratch->reply_tuple. What the verifier need not know of one
 * try in the next one is in scratch.
 */
static __always_inline enum port port_create(const struct settings *settings,
					     struct scratch *scratch)
{
	struct tuple *tuple = &scratch->reply_tuple;
	__u64 sum = sum_without_ports(tuple, &scratch->reply_entry), held_since;

	scratch->oldest = PORT_KEPT;
	for (int i = 0; i < PORT_TRIES; i++) {
		flow_name_port(tuple, &scratch->reply_entry, sum, port_next(&scratch->ports));
		if (!flow_create_named(tuple, &scratch->reply_entry))
			return PORT_FOUND;
		held_since = port_held_since(settings, scratch, HOOK_INGRESS);
		if (held_since < scratch->oldest) {
			scratch->oldest = held_since;
			scratch->oldest_created = scratch->holder_created;
			scratch->oldest_port = tuple->destination_port;
		}
		if (held_since == PORT_IDLE)
			break;
	}
	tuple->destination_port = scratch->oldest_port;
	if (scratch->oldest == PORT_KEPT || !port_take(scratch))
		return NO_PORT;
	return scratch->oldest == PORT_IDLE ? PORT_FOUND : PORT_TAKEN;
}

#endif
