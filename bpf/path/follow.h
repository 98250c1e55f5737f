/* SPDX-License-Identifier: GPL-2.0 */
/* A packet of a known flow: what it becomes, and that the flow has been seen. */
#ifndef EBPFLB_PATH_FOLLOW_H
#define EBPFLB_PATH_FOLLOW_H

#include "path/backend.h"
#include "path/flow.h"

static __always_inline bool flow_has_ended(const struct tuple *asked, const struct flow *flow)
{
	struct tuple there = flow_translate(asked, flow);
	struct tuple back = tuple_reverse(&there, HOOK_EGRESS);
	struct flow *answers = flow_find(&back);

	return (flow->flags | (answers ? answers->flags : 0)) & (FLOW_FIN | FLOW_RST);
}

/*
 * Whether a packet still belongs to the flow of its tuple. TCP and SCTP keep their backend until
 * one side ends the flow; then, or when the backend is gone, what opens one is a new flow. UDP
 * keeps it while it serves (kube-proxy.md 11.1).
 */
static __always_inline bool flow_goes_on(const struct packet *packet, const struct flow *flow)
{
	struct backend backend;

	if (!(flow->flags & FLOW_REQUEST) || !packet->opens)
		return true;
	if (packet->tuple.protocol != UDP && flow_has_ended(&packet->tuple, flow))
		return false;
	return backend_find(flow->service, flow->backend, &backend);
}

static __always_inline void follow(const struct packet *packet, struct flow *flow,
				   struct tuple *to)
{
	*to = flow_translate(&packet->tuple, flow);
	flow_touch(flow, packet, clock_coarse());
}

#endif
