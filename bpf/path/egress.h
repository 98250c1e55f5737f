/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A packet at egress, from top to bottom: un-DNAT of replies, SNAT of requests (kube-proxy.md 5).
 *
 *   its flow is known         rewritten; a request whose SNAT is pending is masqueraded first
 *   the node itself sent it   translated at its socket already; if it was left alone there, because
 *                             a policy forbids it or nobody serves it, it is dropped or refused
 *                             here
 *   it was forwarded          left alone, except TCP to a frontend, of a connection that nobody
 *                             knows: refused (path/forwarded.h)
 */
#ifndef EBPFLB_PATH_EGRESS_H
#define EBPFLB_PATH_EGRESS_H

#include "engine/flows/direct.h"
#include "engine/flows/follow.h"
#include "path/forwarded.h"
#include "path/frontend.h"
#include "engine/flows/masquerade.h"
#include "path/policy.h"

static __always_inline enum verdict egress_to_service(const struct packet *packet,
						      const struct service *service)
{
	const bool is_local_client = true; /* as at the sockets, see client_is_local */
	const struct range *range = policy_is_local_only(service, is_local_client)
					    ? &service->local : &service->cluster;

	if (!policy_admits(service, &packet->tuple.source))
		return VERDICT_SOURCE_DENIED;
	if (range->size)
		return VERDICT_PASSED;
	return service->flags & SERVICE_ENDPOINTS ? VERDICT_NO_LOCAL_ENDPOINT : VERDICT_REFUSED;
}

static __always_inline enum verdict egress_from_node(const struct packet *packet)
{
	struct frontend frontend = tuple_frontend(&packet->tuple);
	struct service service;

	if (!packet->opens)
		return VERDICT_PASSED;
	if (service_read(&frontend, &service) == FOUND)
		return egress_to_service(packet, &service);
	return no_service_verdict(address_use(&frontend.address));
}

/* The outcome for a packet; `to` is the new tuple of one that is rewritten. */
static __always_inline struct outcome egress_packet(struct __sk_buff *ctx,
						    const struct packet *packet,
						    struct tuple *to)
{
	struct flow *flow = flow_find(&packet->tuple);

	if (!flow)
		return unchanged(ctx->ingress_ifindex ? egress_forwarded(ctx, packet)
						      : egress_from_node(packet));
	if (entry_is_not_for(flow, ctx->ifindex))
		return unchanged(VERDICT_PASSED);
	if (flow->kind == FLOW_SNAT_PENDING)
		return masquerade(ctx, packet, flow, to);
	/* FLOW_UN_DNAT: a reply; FLOW_SNAT: a further packet of a masqueraded flow. */
	*to = flow_follow(packet, flow);
	return rewritten(VERDICT_ESTABLISHED);
}

#endif
