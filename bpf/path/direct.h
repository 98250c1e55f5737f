/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A connection that asks for no frontend, but would look like one of ours: its client has another
 * to the same endpoint, by a frontend and from the same port. It gets another port there. (Of UDP
 * every packet would have to be looked at; there the answers go to the flow by the frontend.)
 */
#ifndef EBPFLB_PATH_DIRECT_H
#define EBPFLB_PATH_DIRECT_H

#include "path/follow.h"
#include "path/flow_open.h"

/*
 * Between a bridge and its port, packets of the one connection look like those of the other. So
 * what is beside, which alone has no service, is translated at the client's device alone.
 */
static __always_inline bool beside_elsewhere(const struct flow *flow, __u32 ifindex)
{
	return !flow->service && flow->ifindex != ifindex;
}

static __always_inline enum verdict arrive_beside(const struct packet *packet,
						  const struct settings *settings, __u32 ifindex,
						  struct scratch *arrival, struct tuple *to)
{
	struct flow *flow;

	if (packet->tuple.protocol == UDP)
		return VERDICT_PASSED;
	arrival->back = tuple_reverse(&packet->tuple, HOOK_EGRESS);
	flow = flow_find(&arrival->back);
	if (!flow || flow->ifindex != ifindex)
		return VERDICT_PASSED;
	arrival->backend = (struct backend){ .address = packet->tuple.destination,
					     .port = packet->tuple.destination_port };
	if (flow_open(settings, &packet->tuple, ifindex, false, arrival) != VERDICT_PORT_CHANGED)
		return VERDICT_PASSED;
	*to = flow_translate(&packet->tuple, &arrival->flow);
	return VERDICT_PORT_CHANGED;
}

#endif
