/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A packet at egress, from top to bottom: un-DNAT of replies, SNAT of requests (kube-proxy.md 5).
 *
 *   its flow is known         rewritten; a request whose SNAT is pending is masqueraded first
 *   the node itself sent it   translated at its socket already; if it was left alone there, because
 *                             a policy forbids it or nobody serves it, it is dropped or refused
 *                             here, unless the engine is netfilter
 *   it was forwarded          left alone, except TCP to a frontend, of a connection that nobody
 *                             knows: refused (path/forwarded.h)
 */
#ifndef EBPFLB_PATH_EGRESS_H
#define EBPFLB_PATH_EGRESS_H

#include "engine/flows/direct.h"
#include "engine/flows/follow.h"
#include "engine/flows/gate.h"
#include "engine/netfilter/choose.h"
#include "path/forwarded.h"
#include "rules/frontend.h"
#include "engine/flows/masquerade.h"
#include "rules/selected.h"
#include "sockets/translated.h"

/*
 * Whether the kernel's NAT translates, without flows: then nothing is done here, and nothing is counted.
 * What opens no flow here is not refused either (path/forwarded.h): segments in the middle of a
 * connection that conntrack does not know have got a backend at ingress.
 */
static __always_inline bool egress_has_nothing_to_do(void)
{
	return netfilter_is_chosen(settings_read()) && !flows_may_exist();
}

static __always_inline enum verdict egress_to_service(const struct packet *packet,
						      const struct service *service)
{
	const bool is_local_client = true; /* as at the sockets, see client_is_local */
	const struct range *range = policy_is_local_only(service, is_local_client)
					    ? &service->local : &service->cluster;

	if (service->flags & SERVICE_UNTRACKED)
		return VERDICT_PASSED;
	if (!policy_admits(service, &packet->tuple.source))
		return VERDICT_SOURCE_DENIED;
	if (range->size)
		return VERDICT_PASSED;
	if (service->flags & SERVICE_PASSTHROUGH)
		return VERDICT_PASSED_THROUGH;
	return service->flags & SERVICE_ENDPOINTS ? VERDICT_NO_LOCAL_ENDPOINT : VERDICT_REFUSED;
}

static __always_inline enum verdict egress_from_node(struct __sk_buff *ctx,
						     const struct packet *packet,
						     struct service *service)
{
	struct frontend frontend = tuple_frontend(&packet->tuple);

	if (!packet->opens || netfilter_is_chosen(settings_read()))
		return VERDICT_PASSED;
	if (frontend_may_exist(&frontend) && service_read(&frontend, service, NULL) == FOUND)
		return socket_has_translated(ctx, &packet->tuple)
			       ? VERDICT_TRANSLATED_AT_SOCKET
			       : egress_to_service(packet, service);
	return selected_verdict(selected_without_service(&frontend.address));
}

/* onward->known becomes a copy of the packet's entry, onward->to the new tuple. */
static __always_inline struct outcome egress_packet(struct __sk_buff *ctx,
						    const struct packet *packet,
						    struct onward *onward, struct opening *opening)
{
	struct service *service = &opening->selection.service;
	struct flow *known = &onward->known;
	struct flow *flow = flows_may_exist() ? flow_find(&packet->tuple) : NULL;

	if (!flow)
		return unchanged(ctx->ingress_ifindex ? egress_forwarded(ctx, packet, service)
						      : egress_from_node(ctx, packet, service));
	if (!flow_copy(known, &packet->tuple, flow))
		return unchanged(VERDICT_RECYCLED);
	record_at(STEP_FLOW, known->kind, &known->address);
	if (entry_is_not_for(known, ctx->ifindex))
		return unchanged(VERDICT_PASSED);
	if (known->kind == FLOW_SNAT_PENDING)
		return masquerade(ctx, packet, onward, opening);
	/* FLOW_UN_DNAT: a reply; FLOW_SNAT: a further packet of a masqueraded flow. */
	onward->to = flow_follow(packet, known, flow);
	return rewritten(VERDICT_ESTABLISHED);
}

#endif
