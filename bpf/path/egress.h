/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A packet at egress, from top to bottom: un-DNAT of replies, SNAT of requests (kube-proxy.md 5).
 *
 *   its flow is known         rewritten; a request whose SNAT is pending is masqueraded first
 *   the node itself sent it   translated at its socket already; if it was left alone there, because
 *                             a policy forbids it or nobody serves it, it is dropped or refused
 *                             here, unless the engine is netfilter
 *   it was forwarded          left alone, except TCP to a frontend, of a connection that nobody
 *                             knows: refused (egress_forwarded)
 */
#ifndef EBPFLB_PATH_EGRESS_H
#define EBPFLB_PATH_EGRESS_H

#include "engine/flows/direct.h"
#include "engine/flows/follow.h"
#include "engine/flows/gate.h"
#include "engine/flows/masquerade.h"
#include "engine/netfilter/choose.h"
#include "net/hops.h"
#include "rules/frontend.h"
#include "rules/selected.h"
#include "sockets/datagram.h"

/*
 * Handles TCP packets that this node forwards as a router, to a frontend's address: they belong to
 * no flow and leave by the device where they came in. There are two
 * cases, which look the same in the packet:
 *
 *   the connection is older than the frontend, and this node is a router on its way: the packet goes
 *   on, like with kube-proxy, whose rules conntrack does not apply to a known connection
 *
 *   the connection was one of this frontend, of another node, or of an evicted flow: a router would
 *   send the packet back to this node until its TTL expires. kube-proxy would DNAT it to a random
 *   endpoint, which resets the connection. Here the client is refused.
 *
 * With SERVICE_PASSTHROUGH it may also be one of another node's endpoint, to which routes lead: it goes
 * on, too, because its replies may take another way.
 *
 * In the first case replies are forwarded too, in the other direction. So a connection has the time
 * TRIAL to get a reply. But if a packet comes back with a lower TTL before any reply, it is in a
 * loop.
 */

#define TRIAL 3000000000ULL	/* ns */
#define TRIAL_EXPIRY 600000000000ULL	/* ns; then the tuple may be another connection's */

/* Whether a request's connection is lost: without a reply for TRIAL, or in a loop. */
static __always_inline bool forwarded_is_lost(struct __sk_buff *ctx, const struct packet *packet)
{
	struct forwarded *known = LOOKUP(struct forwarded, forwarded, &packet->tuple);
	struct forwarded first = { .since = clock_coarse(), .hops = hops_read(ctx, packet->v6) };

	if (known && known->replied)
		return false;
	if (known && first.since < known->since + TRIAL_EXPIRY)
		return first.hops < known->hops || first.since > known->since + TRIAL;
	bpf_map_update_elem(MAP(forwarded), &packet->tuple, &first, BPF_ANY);
	return false;
}

/* Notes a reply, but not a reset: that may be this node's own refusal. */
static __always_inline void forwarded_reply(const struct packet *packet)
{
	struct tuple request_tuple = tuple_reverse(&packet->tuple, HOOK_EGRESS);
	struct forwarded *known;

	if (packet->ends & FLOW_RST)
		return;
	known = LOOKUP(struct forwarded, forwarded, &request_tuple);
	if (known && !known->replied)
		known->replied = true;
}

static __always_inline enum verdict egress_forwarded(struct __sk_buff *ctx,
						     const struct packet *packet,
						     struct service *service)
{
	struct frontend frontend = tuple_frontend(&packet->tuple);

	if (ctx->ingress_ifindex != ctx->ifindex || frontend.protocol != TCP || packet->opens ||
	    packet->piece == LATER)
		return VERDICT_PASSED;
	if (service_read(&frontend, service, NULL) != FOUND) {
		forwarded_reply(packet);
		return VERDICT_PASSED;
	}
	if (service->flags & (SERVICE_UNTRACKED | SERVICE_PASSTHROUGH) || !forwarded_is_lost(ctx, packet))
		return VERDICT_PASSED;
	return packet->ends & FLOW_RST ? VERDICT_REJECT_LIMITED : VERDICT_REFUSED;
}

/*
 * Whether the kernel's NAT translates, without flows: then nothing is done here, and nothing is counted.
 * What opens no flow here is not refused either (egress_forwarded): segments in the middle of a
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
