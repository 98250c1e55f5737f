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
#include "path/attempt.h"
#include "core/outcome.h"
#include "path/reply_to_device.h"
#include "path/select_backend.h"
#include "path/vip.h"
#include "core/note.h"
#include "sockets/datagram.h"

/* As policy_masquerades; and where this node would not see the replies. */
static __always_inline enum masquerade_reason
ingress_masquerades(struct __sk_buff *ctx, const struct packet *packet,
		    const struct settings *settings, const struct selection *selection)
{
	enum masquerade_reason reason =
		policy_masquerades(settings, selection, &packet->tuple.source);
	__u32 flags = selection->service.flags;

	if (!reason && flags & SERVICE_EXTERNAL && !(flags & SERVICE_LOCAL) &&
	    !client_is_symmetric(ctx, packet, &selection->backend))
		reason = MASQUERADE_ASYMMETRIC;
	if (reason)
		record(STEP_SNAT, reason);
	return reason;
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
						   struct onward *onward, struct opening *opening)
{
	const struct flow *entry = &opening->request_entry;
	bool masquerade = !is_direct &&
			  ingress_masquerades(ctx, packet, settings, &opening->selection);
	enum opened opened = flow_open(settings, packet, ctx->ifindex, is_direct, masquerade,
				       opening);

	record(STEP_OPENED, opened);
	onward->to = flow_translate(&packet->tuple, entry);
	if (opened == OPENED_WITH_PORT)
		return rewritten(VERDICT_PORT_CHANGED);
	if (entry->kind == FLOW_DIRECT)
		return unchanged(VERDICT_PASSED);
	if (opened == OPENED)
		return rewritten(VERDICT_TRANSLATED);
	if (opened == NO_FREE_PORT)
		return unchanged(VERDICT_PORTS_EXHAUSTED);
	if (packet->tuple.protocol == TCP || entry->flags & FLOW_MASQUERADE)
		return unchanged(VERDICT_FLOWS_FULL);
	return ingress_stateless(packet, &opening->selection.backend, &onward->to);
}

/*
 * A packet of a flow that is known; undecided if it may open a new flow, even in place of the known
 * one. onward->known becomes a copy of its entry. A flow that is replaced is closed, by opening->other.
 */
static __always_inline struct outcome ingress_known(struct __sk_buff *ctx,
						    const struct packet *packet,
						    struct onward *onward, struct opening *opening)
{
	struct flow *known = &onward->known;
	struct flow *flow = flows_may_exist() ? flow_find(&packet->tuple) : NULL;

	if (!flow) {
		onward->to = packet->tuple;
		if (!packet->is_bridged && reply_leads_to_device(ctx, packet, onward))
			return rewritten(VERDICT_ESTABLISHED);
		if (onward->mtu)
			return unchanged(VERDICT_TOO_LONG);
		return packet->opens || packet->tuple.protocol == TCP ? undecided()
								      : unchanged(VERDICT_PASSED);
	}
	if (!flow_copy(known, &packet->tuple, flow))
		return unchanged(VERDICT_RECYCLED);
	record_at(STEP_FLOW, known->kind, &known->address);
	if (entry_is_not_for(known, ctx->ifindex) ||
	    (packet->is_bridged && known->kind != FLOW_DIRECT))
		return unchanged(VERDICT_PASSED);
	if (flow_continues(packet, known, flow)) {
		onward->to = flow_follow(packet, known, flow);
		translated_note(ctx, known);
		if (known->kind == FLOW_UN_SNAT)
			reply_leads_to_device(ctx, packet, onward);
		return onward->mtu ? unchanged(VERDICT_TOO_LONG) : rewritten(VERDICT_ESTABLISHED);
	}
	record(STEP_FLOW_REPLACED, 0);
	flow_close(&packet->tuple, known, &opening->other);
	return undecided();
}

/* A segment in the middle of a connection is never refused: conntrack may know it. */
static __always_inline struct outcome ingress_middle(struct __sk_buff *ctx,
						     const struct packet *packet,
						     const struct settings *settings,
						     enum selected selected,
						     const struct selection *selection)
{
	if (selected == SELECTED)
		leave_to_netfilter(ctx, packet, settings, selection);
	else
		choice_remember(ctx, &packet->tuple, settings, 0);
	return unchanged(VERDICT_PASSED);
}

/* Whether the flow tables may not open a flow: its reply could leave by a device without egress. */
static __always_inline bool flows_wait(const struct settings *settings)
{
	if (!(settings->flags & SETTING_ATTACHING))
		return false;
	record(STEP_ATTACHING, 0);
	return true;
}

/* Whether a packet for which a backend was selected goes there: its flow may have found no place. */
static __always_inline bool leads_to_backend(struct outcome outcome)
{
	return outcome.rewrite || outcome.verdict == VERDICT_TRANSLATED ||
	       outcome.verdict == VERDICT_MASQUERADED;
}

/* A packet that opens a flow, if there is a backend for it. */
static __always_inline struct outcome ingress_selected(struct __sk_buff *ctx,
						       const struct packet *packet,
						       const struct request *request,
						       enum selected selected,
						       struct onward *onward,
						       struct opening *opening)
{
	const struct settings *settings = request->settings;
	struct outcome outcome = undecided();
	bool is_direct = (selected == NO_SERVICE || selected == AT_SOCKET) &&
			 direct_select(&packet->tuple, ctx->ifindex, opening) &&
			 /* perhaps it was translated there */
			 !port_has_decided(ctx, DEVICE_MASTER);

	if (is_direct)
		record(STEP_DIRECT, 0);
	if (selected == SELECTED)
		outcome = leave_to_netfilter(ctx, packet, settings, &opening->selection);
	else if (!is_direct)
		outcome = unchanged(selected == NO_SERVICE && !packet->is_bridged
					    ? vip_unknown_port(request, packet,
							       &opening->selection.service)
					    : selected_verdict(selected));
	if (!outcome.decided)
		outcome = flows_wait(settings)
				  ? unchanged(VERDICT_PASSED)
				  : ingress_open(ctx, packet, settings, is_direct, onward, opening);
	if (selected == SELECTED && leads_to_backend(outcome))
		attempt_begin(packet, &opening->selection);
	return outcome;
}

/*
 * A packet of no flow in the flow tables: a backend is chosen if it is for a frontend. What is for
 * nobody was refused at a bridge's port. If it gets to the bridge, netfilter has translated it between
 * them: a reply to a socket of the node, to which IPVS gives the service's address as its own.
 */
static __always_inline struct outcome ingress_request(struct __sk_buff *ctx,
						      const struct packet *packet,
						      const struct settings *settings,
						      struct onward *onward,
						      struct opening *opening)
{
	struct frontend frontend = tuple_frontend(&packet->tuple);
	bool may_exist = !packet->is_bridged && frontend_may_exist(&frontend);
	struct request request = { .frontend = &frontend,
				   .packet = ctx,
				   .tuple = &packet->tuple,
				   .settings = settings,
				   .ifindex = ctx->ifindex,
				   .in_middle = !packet->opens };
	enum selected selected;

	OPAQUE(request.ifindex);	/* else clang reads it by a pointer that the verifier refuses */
	if (!packet->opens && (!netfilter_is_chosen(settings) || !may_exist ||
			       choice_repeats(ctx, &packet->tuple, settings)))
		return unchanged(VERDICT_PASSED);
	request.is_translated =
		(may_exist || address_may_be_vip(settings, &packet->tuple.destination)) &&
		socket_has_translated(ctx, &packet->tuple);
	if (may_exist && !request.is_translated && datagram_repeats(ctx, packet, settings))
		return unchanged(VERDICT_ESTABLISHED);
	selected = may_exist		? select_backend(&request, &opening->selection)
		   : packet->is_bridged ? NO_SERVICE
					: selected_without_service(&packet->tuple.destination);
	if (is_for_nobody(selected) && port_has_decided(ctx, DEVICE_ALL_PORTS))
		return unchanged(VERDICT_PASSED);
	if (selected == AT_SOCKET)
		choice_remember(ctx, &packet->tuple, settings, 0);
	if (settings->flags & SETTING_SHADOW)
		return unchanged(selected_verdict(selected));
	if (!packet->opens)
		return ingress_middle(ctx, packet, settings, selected, &opening->selection);
	return ingress_selected(ctx, packet, &request, selected, onward, opening);
}

/* onward->to becomes the new tuple of a packet that is rewritten. */
static __always_inline struct outcome ingress_packet(struct __sk_buff *ctx,
						     const struct packet *packet,
						     struct onward *onward, struct opening *opening)
{
	struct settings *settings = settings_read();
	struct outcome outcome;

	attempt_repeat(packet);
	outcome = ingress_known(ctx, packet, onward, opening);
	if (outcome.decided)
		return outcome;
	if (!netfilter_is_chosen(settings) && flows_wait(settings))
		return unchanged(VERDICT_PASSED);
	return ingress_request(ctx, packet, settings, onward, opening);
}

#endif
