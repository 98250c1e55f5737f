/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A packet's way out: its flow, given a source of this node where it is masqueraded; at egress
 * sources are rewritten. What the node itself sends to a frontend has been translated at its
 * socket; what was not, because it may not be, ends here. So does what was led astray to us.
 */
#ifndef EBPFLB_PATH_EGRESS_H
#define EBPFLB_PATH_EGRESS_H

#include "path/direct.h"
#include "path/masquerade.h"

static __always_inline enum verdict leave_for(const struct packet *packet,
					      const struct service *service)
{
	const struct range *range = policy_confines(service, true) ? &service->local
								   : &service->cluster;

	if (!policy_admits(service, &packet->tuple.source))
		return VERDICT_SOURCE_DENIED;
	if (!range->size && service->flags & SERVICE_ENDPOINTS)
		return VERDICT_NO_LOCAL_ENDPOINT;
	return VERDICT_PASSED;
}

static __always_inline enum verdict leave_from_node(const struct packet *packet)
{
	struct frontend to = frontend_asked(&packet->tuple);
	struct service service;

	if (!packet->opens)
		return VERDICT_PASSED;
	if (service_read(&to, &service) == FOUND)
		return leave_for(packet, &service);
	if (policy_unserved(&to.address) == VERDICT_UNALLOCATED)
		return VERDICT_UNALLOCATED;
	return VERDICT_PASSED;
}

/*
 * Sent back where it came from, still for a frontend, though conntrack has had its turn: of a
 * connection that another node knows, or nobody. Its client is told so, as an endpoint would that
 * conntrack picks at random.
 */
static __always_inline enum verdict leave_astray(struct __sk_buff *ctx,
						 const struct packet *packet)
{
	struct frontend to = frontend_asked(&packet->tuple);
	struct service service;

	if (ctx->ingress_ifindex != ctx->ifindex || to.protocol != TCP || packet->opens ||
	    packet->piece == LATER || service_read(&to, &service) != FOUND)
		return VERDICT_PASSED;
	return packet->ends & FLOW_RST ? VERDICT_REJECT_LIMITED : VERDICT_REFUSED;
}

static __always_inline enum verdict leave_masqueraded(struct __sk_buff *ctx,
						      const struct packet *packet,
						      struct flow *pending,
						      struct tuple *to)
{
	struct settings *settings = settings_read();

	if (!settings)
		return VERDICT_PORTS_EXHAUSTED;
	return masquerade(ctx, packet, settings, pending, to);
}

/* Decides about a packet; one that is to be rewritten becomes to. */
static __always_inline enum verdict leave(struct __sk_buff *ctx, const struct packet *packet,
					  struct tuple *to)
{
	struct flow *flow = flow_find(&packet->tuple);

	if (!flow)
		return ctx->ingress_ifindex ? leave_astray(ctx, packet) : leave_from_node(packet);
	if (beside_elsewhere(flow, ctx->ifindex))
		return VERDICT_PASSED;
	if (!flow->port)
		return leave_masqueraded(ctx, packet, flow, to);
	follow(packet, flow, to);
	return VERDICT_ESTABLISHED;
}

#endif
