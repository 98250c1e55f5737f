/* SPDX-License-Identifier: GPL-2.0 */
/* A packet of a known flow: what it becomes, and that the flow has been seen. */
#ifndef EBPFLB_PATH_FOLLOW_H
#define EBPFLB_PATH_FOLLOW_H

#include "path/backend.h"
#include "path/flow.h"

#define PATIENCE 3000000000ULL	/* ns; a SYN is sent again after 1 s and after 3 s (RFC 6298) */

/* Ended by a side; or no answer has passed for so long, and none will. */
static __always_inline bool flow_is_over(const struct tuple *asked, const struct flow *flow)
{
	struct tuple there = flow_translate(asked, flow);
	struct tuple back = tuple_reverse(&there, HOOK_EGRESS);
	struct flow *answers = flow_find(&back);
	__u32 flags = flow->flags | (answers ? answers->flags : 0);

	return flags & (FLOW_FIN | FLOW_RST) ||
	       (!(flags & FLOW_SEEN) && clock_coarse() > flow->created + PATIENCE);
}

/*
 * Whether a packet still belongs to the flow of its tuple. TCP and SCTP keep their backend until
 * the flow is over; then, or when the backend is gone, what opens one is a new flow, by the rules
 * of now. UDP keeps it while it serves (kube-proxy.md 11.1). What is beside has no service.
 */
static __always_inline bool flow_goes_on(const struct packet *packet, const struct flow *flow)
{
	struct backend backend;

	if (!(flow->flags & FLOW_REQUEST) || !packet->opens)
		return true;
	if (packet->tuple.protocol != UDP && flow_is_over(&packet->tuple, flow))
		return false;
	return !flow->service || backend_find(flow->service, flow->backend, &backend);
}

/*
 * A packet of it has come by. One that opens a connection says nothing yet of its client: the
 * address may be forged. So may a reset that others follow: who has reset sends nothing more.
 */
static __always_inline void flow_touch(struct flow *flow, const struct packet *packet, __u64 now)
{
	bool opens = packet->opens && packet->tuple.protocol != UDP;
	__u32 before = opens || packet->ends ? flow->flags : flow->flags & ~FLOW_RST;
	__u32 flags = before | packet->ends | (opens ? 0 : FLOW_SEEN);

	if (flow->flags != flags)
		flow->flags = flags;
	if (flow->last_seen != now)
		flow->last_seen = now;
}

static __always_inline void follow(const struct packet *packet, struct flow *flow,
				   struct tuple *to)
{
	*to = flow_translate(&packet->tuple, flow);
	flow_touch(flow, packet, clock_coarse());
}

#endif
