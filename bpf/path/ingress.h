/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A packet at ingress, from top to bottom: DNAT of requests, un-SNAT of replies (kube-proxy.md 4).
 *
 *   its flow is known      rewritten
 *   it is to a frontend    if conntrack knows its flow, left to netfilter; else a backend is
 *                          selected, and one of the engines opens a flow
 *   anything else          left alone: it may belong to a connection that conntrack knows
 */
#ifndef EBPFLB_PATH_INGRESS_H
#define EBPFLB_PATH_INGRESS_H

#include "engine/conntrack/open.h"
#include "engine/flows/direct.h"
#include "engine/flows/close.h"
#include "engine/flows/follow.h"
#include "engine/flows/open.h"
#include "path/outcome.h"
#include "path/select.h"

static __always_inline bool ingress_needs_snat(struct __sk_buff *ctx, const struct packet *packet,
					       const struct settings *settings,
					       const struct selection *selection)
{
	__u32 flags = selection->service.flags;

	if (policy_needs_snat(settings, selection, &packet->tuple.source))
		return true;
	return flags & SERVICE_EXTERNAL && !(flags & SERVICE_LOCAL) &&
	       !client_is_symmetric(ctx, packet, &selection->backend);
}

/* The map of flows is full: a datagram is rewritten, but its replies will not be translated. */
static __always_inline struct outcome ingress_stateless(const struct packet *packet,
							const struct backend *backend,
							struct tuple *to)
{
	verdict_count(VERDICT_FLOWS_FULL);
	*to = packet->tuple;
	to->destination = backend->address;
	to->destination_port = backend->port;
	return rewritten(VERDICT_TRANSLATED);
}

/* Opens a flow to the backend that was selected. */
static __always_inline struct outcome ingress_open(struct __sk_buff *ctx,
						   const struct packet *packet,
						   const struct settings *settings, bool is_direct,
						   struct scratch *scratch, struct tuple *to)
{
	const struct selection *selection = &scratch->selection;
	bool masquerade = !is_direct && ingress_needs_snat(ctx, packet, settings, selection);
	enum opened opened = flow_open(settings, &packet->tuple, ctx->ifindex, is_direct,
				       masquerade, scratch);

	*to = flow_translate(&packet->tuple, &scratch->request_entry);
	if (opened == OPENED_WITH_PORT)
		return rewritten(VERDICT_PORT_CHANGED);
	if (is_direct)
		return unchanged(VERDICT_PASSED);
	if (opened == OPENED)
		return rewritten(VERDICT_TRANSLATED);
	if (opened == NO_FREE_PORT)
		return unchanged(VERDICT_PORTS_EXHAUSTED);
	if (packet->tuple.protocol == TCP || masquerade)
		return unchanged(VERDICT_FLOWS_FULL);
	return ingress_stateless(packet, &selection->backend, to);
}

/* A packet that may open a flow: to a service, or directly to a backend. */
static __always_inline struct outcome ingress_new(struct __sk_buff *ctx,
						  const struct packet *packet, struct tuple *to)
{
	struct settings *settings = settings_read();
	struct scratch *scratch = scratch_here();
	struct frontend frontend = tuple_frontend(&packet->tuple);
	struct request request = { .frontend = &frontend,
				   .packet = ctx,
				   .tuple = &packet->tuple,
				   .settings = settings,
				   .ifindex = ctx->ifindex };
	enum selected selected;
	enum verdict verdict;
	bool is_direct = false;

	if (!settings || !scratch || settings->flags & SETTING_ATTACHING)
		return unchanged(VERDICT_PASSED);
	selected = select_backend(&request, &scratch->selection);
	if (selected != SELECTED) {
		verdict = selected_verdict(selected, &frontend.address);
		is_direct = verdict == VERDICT_PASSED &&
			    direct_select(&packet->tuple, ctx->ifindex, scratch);
		if (!is_direct)
			return unchanged(verdict);
	}
	verdict = is_direct ? VERDICT_PASSED
			    : conntrack_open(ctx, packet, settings, &scratch->selection);
	if (verdict != VERDICT_PASSED)
		return unchanged(verdict);
	return ingress_open(ctx, packet, settings, is_direct, scratch, to);
}

/* The outcome for a packet; `to` is the new tuple of one that is rewritten. */
static __always_inline struct outcome ingress_packet(struct __sk_buff *ctx,
						     const struct packet *packet,
						     struct tuple *to)
{
	struct flow *flow = flow_find(&packet->tuple);

	if (flow && entry_is_not_for(flow, ctx->ifindex))
		return unchanged(VERDICT_PASSED);
	if (flow && flow_continues(packet, flow)) {
		*to = flow_follow(packet, flow);
		return rewritten(VERDICT_ESTABLISHED);
	}
	if (!packet->opens)
		return unchanged(VERDICT_PASSED);
	if (flow)
		flow_close(&packet->tuple, flow);
	return ingress_new(ctx, packet, to);
}

#endif
