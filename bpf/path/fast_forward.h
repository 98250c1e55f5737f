/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The variant of --fast-forward (-DFAST_FORWARD): once a flow has been answered its packets are
 * translated at ingress, both times, and redirected to the next hop past routing rules, netfilter
 * and conntrack. The egress program leaves them alone.
 *
 * What the stack has to answer, cut or see goes there as without the option: what opens or ends a
 * flow; the last hop; what is too long; fragments and IP options; what has no neighbour yet; and of
 * each direction one packet in REFRESH, by which conntrack keeps its entry.
 */
#ifndef EBPFLB_PATH_FAST_FORWARD_H
#define EBPFLB_PATH_FAST_FORWARD_H

#include "engine/flows/follow.h"
#include "engine/flows/gate.h"
#include "path/forwardable.h"

#ifdef FAST_FORWARD

/* Whether a later datagram of a request keeps its backend as things are (flow_continues). */
static __always_inline bool datagram_continues(const struct flow *known)
{
	struct settings *settings = settings_read();
	struct backend backend ALIGNED;

	return settings && known->frontend_moves == settings->frontend_moves &&
	       backend_find(known->service, known->backend, &backend);
}

/*
 * Whether the packet's entry at ingress, of which scratch->known is a copy, lets it pass; then
 * scratch->to is the packet between the hooks. Without an entry it may be a reply.
 */
static __always_inline bool forward_first(struct scratch *scratch, struct flow *flow)
{
	const struct packet *packet = &scratch->packet;
	struct flow *known = &scratch->known;

	scratch->to = packet->tuple;
	known->kind = 0;
	if (!flow)
		return true;
	if (!flow_copy(known, &packet->tuple, flow) || !entry_is_forwardable(known) ||
	    (known->kind != FLOW_DNAT && known->kind != FLOW_UN_SNAT))
		return false;
	scratch->to = flow_translate(&packet->tuple, known);
	return known->kind != FLOW_DNAT || packet->tuple.protocol == TCP ||
	       (datagram_continues(known) && datagram_is_answered(&scratch->to));
}

/*
 * The second translation, which egress would do: scratch->other becomes a copy of the entry,
 * scratch->snat_tuple the tuple then.
 */
static __always_inline bool forward_second(struct scratch *scratch, struct flow *flow)
{
	struct flow *other = &scratch->other;

	if (!flow || !flow_copy(other, &scratch->reply_tuple, flow) ||
	    !entry_is_forwardable(other) ||
	    other->kind != (scratch->known.kind == FLOW_DNAT ? FLOW_SNAT : FLOW_UN_DNAT))
		return false;
	scratch->snat_tuple = flow_translate(&scratch->reply_tuple, other);
	return true;
}

/* As flow_touch, of a packet that neither opens nor ends the flow of an answered entry. */
static __always_inline void forward_touch(const struct flow *known, struct flow *flow,
					  const struct packet *packet,
					  const struct tuple *translated)
{
	__u64 now = clock_coarse();

	if (!flow_remains(flow, known))
		return;
	if (packet->control)
		window_follow(flow, packet, translated);
	if (flow->last_seen != now)
		flow->last_seen = now;
}

/* Replies leave by the device where requests came in, requests as they are routed. */
static __always_inline bool forward_out(struct __sk_buff *ctx, struct scratch *scratch)
{
	if (scratch->known.kind == FLOW_DNAT)
		return forward_to(ctx, scratch, &scratch->snat_tuple, ctx->ifindex, FORWARDED);
	return forward_to(ctx, scratch, &scratch->snat_tuple, scratch->other.ifindex,
			  BPF_FIB_LOOKUP_OUTPUT);
}

/* Sets scratch->device if the packet is to leave by it, and scratch->to: its tuple then. */
static __always_inline void fast_forward(struct __sk_buff *ctx, struct scratch *scratch)
{
	const struct packet *packet = &scratch->packet;
	struct flow *first, *second = NULL;

	if (!flows_may_exist() || !packet_is_forwardable(ctx, packet))
		return;
	first = flow_find(&packet->tuple);
	if (!forward_first(scratch, first))
		return;
	scratch->snat_tuple = scratch->to;
	if (!(scratch->known.kind == FLOW_DNAT && !(scratch->known.flags & FLOW_MASQUERADE))) {
		scratch->reply_tuple = scratch->to;
		scratch->reply_tuple.hook = HOOK_EGRESS;
		second = flow_find(&scratch->reply_tuple);
		if (!forward_second(scratch, second))
			return;
	}
	if (!forward_out(ctx, scratch))
		return;
	if (first)
		forward_touch(&scratch->known, first, packet, &scratch->to);
	if (second)
		forward_touch(&scratch->other, second, packet, &scratch->snat_tuple);
	scratch->to = scratch->snat_tuple;
}

#endif

/* Whether the packet has been translated for good, and is to be redirected. */
static __always_inline bool fast_forwarded(struct __sk_buff *ctx, struct scratch *scratch)
{
#if defined(FAST_FORWARD) && !defined(NO_LINK_HEADER)
	fast_forward(ctx, scratch);
	barrier();	/* all ways meet here: the verifier follows what comes next once */
	return scratch->device;
#else
	return false;
#endif
}

#endif
