/* SPDX-License-Identifier: GPL-2.0 */
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
#ifndef EBPFLB_PATH_FORWARDED_H
#define EBPFLB_PATH_FORWARDED_H

#include "net/hops.h"
#include "rules/frontend.h"

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

#endif
