/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A packet at ingress, from top to bottom: DNAT of requests, un-SNAT of replies (kube-proxy.md 4).
 *
 *   the flow tables know it     rewritten
 *   it opens a flow to a        a backend is selected; netfilter translates the packet to it, or a
 *   frontend                    flow is opened in the flow tables
 *   anything else               left alone: it may belong to a connection that conntrack knows
 */
#ifndef EBPFLB_PATH_INGRESS_H
#define EBPFLB_PATH_INGRESS_H

#include "engine/flows/direct.h"
#include "engine/flows/close.h"
#include "engine/flows/follow.h"
#include "engine/flows/gate.h"
#include "engine/flows/open.h"
#include "engine/netfilter/choose.h"
#include "path/fast_forward.h"
#include "core/outcome.h"
#include "path/reply_path.h"
#include "path/select.h"
#include "core/note.h"

static __always_inline bool ingress_needs_snat(struct __sk_buff *ctx, const struct packet *packet,
					       const struct settings *settings,
					       const struct selection *selection)
{
	__u32 flags = selection->service.flags;

	if (policy_needs_snat(settings, selection, &packet->tuple.source))
		return true;
	return because(STEP_SNAT, STEP_SNAT_ASYMMETRIC,
		       flags & SERVICE_EXTERNAL && !(flags & SERVICE_LOCAL) &&
			       !client_is_symmetric(ctx, packet, &selection->backend));
}

/* The map of flows is full: a datagram is rewritten, but its replies will not be translated. */
static __always_inline struct outcome ingress_stateless(struct scratch *scratch)
{
	verdict_count(VERDICT_FLOWS_FULL);
	scratch->to = scratch->packet.tuple;
	scratch->to.destination = scratch->selection.backend.address;
	scratch->to.destination_port = scratch->selection.backend.port;
	return rewritten(VERDICT_TRANSLATED);
}

/* Opens a flow to the backend that was selected. */
static __always_inline struct outcome ingress_open(struct __sk_buff *ctx,
						   const struct settings *settings, bool is_direct,
						   struct scratch *scratch)
{
	const struct packet *packet = &scratch->packet;
	bool masquerade = !is_direct &&
			  ingress_needs_snat(ctx, packet, settings, &scratch->selection);
	enum opened opened = flow_open(ctx, settings, packet, is_direct, masquerade, scratch);

	record(STEP_OPENED, opened);
	scratch->to = flow_translate(&packet->tuple, &scratch->request_entry);
	if (opened == OPENED_WITH_PORT)
		return rewritten(VERDICT_PORT_CHANGED);
	if (scratch->request_entry.kind == FLOW_DIRECT)
		return unchanged(VERDICT_PASSED);
	if (opened == OPENED)
		return rewritten(VERDICT_TRANSLATED);
	if (opened == NO_FREE_PORT)
		return unchanged(VERDICT_PORTS_EXHAUSTED);
	if (packet->tuple.protocol == TCP || scratch->request_entry.flags & FLOW_MASQUERADE)
		return unchanged(VERDICT_FLOWS_FULL);
	return ingress_stateless(scratch);
}

/*
 * A packet of a flow that is known; undecided if it may open one, also in place of that.
 * scratch->known becomes a copy of its entry.
 */
static __always_inline struct outcome ingress_known(struct __sk_buff *ctx,
						    struct scratch *scratch)
{
	const struct packet *packet = &scratch->packet;
	struct flow *known = &scratch->known;
	struct flow *flow = flows_may_exist() ? flow_find(&packet->tuple) : NULL;

	if (!flow) {
		scratch->to = packet->tuple;
		if (reply_leads_to_device(ctx, scratch, &scratch->to))
			return rewritten(VERDICT_ESTABLISHED);
		if (scratch->mtu)
			return unchanged(VERDICT_TOO_LONG);
		return packet->opens || packet->tuple.protocol == TCP ? undecided()
								      : unchanged(VERDICT_PASSED);
	}
	if (!flow_copy(known, &packet->tuple, flow))
		return unchanged(VERDICT_RECYCLED);
	record_at(STEP_FLOW, known->kind, &known->address);
	if (entry_is_not_for(known, ctx->ifindex))
		return unchanged(VERDICT_PASSED);
	if (flow_is_gone(packet, known, flow))
		return unchanged(VERDICT_ENDPOINT_GONE);
	if (flow_continues(packet, known, flow)) {
		scratch->to = flow_follow(packet, known, flow);
		translated_note(ctx, known);
		if (known->kind == FLOW_UN_SNAT)
			reply_leads_to_device(ctx, scratch, &scratch->to);
		return scratch->mtu ? unchanged(VERDICT_TOO_LONG) : rewritten(VERDICT_ESTABLISHED);
	}
	record(STEP_FLOW_REPLACED, 0);
	flow_close(&packet->tuple, known);
	return undecided();
}

/* A segment in the middle of a connection is refused by nothing: conntrack may know it. */
static __always_inline struct outcome ingress_middle(struct __sk_buff *ctx,
						     const struct settings *settings,
						     enum selected selected,
						     const struct scratch *scratch)
{
	if (selected == SELECTED)
		choose(ctx, &scratch->packet, settings, &scratch->selection);
	else
		segment_remember(ctx, &scratch->packet.tuple);
	return unchanged(VERDICT_PASSED);
}

/* A packet that opens a flow, if there is a backend for it. */
static __always_inline struct outcome ingress_selected(struct __sk_buff *ctx,
						       const struct settings *settings,
						       enum selected selected,
						       struct scratch *scratch)
{
	const struct packet *packet = &scratch->packet;
	struct outcome outcome = undecided();
	bool is_direct = because(STEP_DIRECT, 0,
				 selected == NO_SERVICE &&
					 direct_select(&packet->tuple, ctx->ifindex, scratch));

	if (selected == SELECTED)
		outcome = choose(ctx, packet, settings, &scratch->selection);
	else if (!is_direct)
		outcome = unchanged(selected_verdict(selected));
	return outcome.decided ? outcome : ingress_open(ctx, settings, is_direct, scratch);
}

/* A packet of no flow in the flow tables: a backend is chosen if it is for a frontend. */
static __always_inline struct outcome ingress_request(struct __sk_buff *ctx,
						      const struct settings *settings,
						      struct scratch *scratch)
{
	const struct packet *packet = &scratch->packet;
	struct frontend frontend = tuple_frontend(&packet->tuple);
	bool may_exist = frontend_may_exist(&frontend);
	struct request request = { .frontend = &frontend,
				   .packet = ctx,
				   .tuple = &packet->tuple,
				   .settings = settings,
				   .ifindex = ctx->ifindex,
				   .in_middle = !packet->opens };
	enum selected selected;

	OPAQUE(request.ifindex);	/* else clang reads it by a pointer that the verifier refuses */
	if (!packet->opens && (!netfilter_is_chosen(settings) || !may_exist ||
			       segment_repeats(ctx, &packet->tuple)))
		return unchanged(VERDICT_PASSED);
	if (may_exist && datagram_repeats(ctx, packet, settings))
		return unchanged(VERDICT_ESTABLISHED);
	selected = may_exist ? select_backend(&request, &scratch->selection)
			     : selected_without_service(&packet->tuple.destination);
	if (settings->flags & SETTING_SHADOW)
		return unchanged(selected_verdict(selected));
	if (!packet->opens)
		return ingress_middle(ctx, settings, selected, scratch);
	return ingress_selected(ctx, settings, selected, scratch);
}

/* scratch->to becomes the new tuple of a packet that is rewritten. */
static __always_inline struct outcome ingress_packet(struct __sk_buff *ctx,
						     struct scratch *scratch)
{
	struct outcome outcome;
	struct settings *settings;

	if (fast_forwarded(ctx, scratch))
		return rewritten(VERDICT_ESTABLISHED);
	outcome = ingress_known(ctx, scratch);
	if (outcome.decided)
		return outcome;
	settings = settings_read();
	if (!settings || because(STEP_ATTACHING, 0, settings->flags & SETTING_ATTACHING))
		return unchanged(VERDICT_PASSED);
	return ingress_request(ctx, settings, scratch);
}

#endif
