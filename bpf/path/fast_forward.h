/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The variant of --fast-forward (-DFAST_FORWARD), for packets of answered flows of the flow tables
 * (path/forwarded.h is about packets of no flow): once a flow has been answered the ingress program
 * does both translations, DNAT and SNAT or their reverse, and redirects the packet to the next hop,
 * past routing rules, netfilter and conntrack. The egress program leaves it alone. A request to a pod on
 * this node is handed to the pod's end of its device instead (map pod_devices).
 *
 * These packets still take the kernel's stack: the first PACKETS_SEEN of each direction; those that
 * open or end a flow; with a TTL or hop limit of 1; longer than the MTU; fragments and IP options;
 * without a known neighbour; and of each direction one packet in REFRESH, by which conntrack keeps
 * its entry.
 */
#ifndef EBPFLB_PATH_FAST_FORWARD_H
#define EBPFLB_PATH_FAST_FORWARD_H

#include "engine/flows/follow.h"
#include "engine/flows/gate.h"
#include "engine/flows/table.h"
#include "net/hops.h"
#include "path/packet_route.h"

#ifdef FAST_FORWARD

/* Which packets may bypass the stack, and by which device they leave. */

#define REFRESH(time) ((time) >> 33)	/* ns: a number that changes every 8.6 s */
#define TO_THIS_HOST 0		/* PACKET_HOST: the frame has the device's MAC address */
#define UNANSWERED 1		/* a length that fits every route, and is not any route's MTU */

static __always_inline bool packet_is_forwardable(struct __sk_buff *ctx,
						  const struct packet *packet)
{
	__u8 protocol = packet->tuple.protocol;

	if (!(settings_read()->flags & SETTING_FAST_FORWARD))
		return false;
	if (protocol != UDP && (protocol != TCP || packet->control & TCP_SYN || packet->ends))
		return false;
	return ctx->pkt_type == TO_THIS_HOST && packet->piece == WHOLE && !packet->options &&
	       hops_are_left(ctx, packet);
}

/* Whether the entry belongs to an answered flow that conntrack has seen lately. */
static __always_inline bool entry_is_forwardable(const struct flow *entry)
{
	return entry->flags & FLOW_SEEN && entry->packets >= PACKETS_SEEN &&
	       !(entry->flags & (FLOW_FIN | FLOW_RST | FLOW_GONE)) &&
	       REFRESH(entry->last_seen) == REFRESH(clock_coarse());
}

/* Whether a datagram's flow had a reply. (FLOW_SEEN tells so for TCP: flow_is_answered.) */
static __always_inline bool datagram_is_answered(const struct tuple *translated)
{
	struct flow *reply_entry = flow_opposite(translated);

	return reply_entry && reply_entry->flags & FLOW_SEEN;
}

/*
 * Whether the route takes a packet of this length. Since 5.12 the kernel replaces the given length
 * by the route's MTU. Older kernels compare it with the device's MTU, except for GSO packets.
 */
static __always_inline bool route_takes(const struct bpf_fib_lookup *route, __u32 length)
{
	return length && length <= (route->tot_len == UNANSWERED ? LEAST_MTU : route->tot_len);
}

/* Sets onward->device and its next hop if the translated packet can leave that way. */
static __always_inline bool forward_to(struct __sk_buff *ctx, const struct packet *packet,
				       struct onward *onward, const struct tuple *tuple,
				       __u32 ifindex, __u32 how)
{
	EMPTY(struct bpf_fib_lookup, route);

	route_request(route, tuple, packet->v6, &tuple->destination, tuple->destination_port,
		      ifindex);
	route->tot_len = UNANSWERED;
	if (bpf_fib_lookup(ctx, route, sizeof(*route), how) != BPF_FIB_LKUP_RET_SUCCESS ||
	    (how == BPF_FIB_LOOKUP_OUTPUT && route->ifindex != ifindex) ||
	    !route_takes(route, packet_length_sent(ctx, packet)))
		return false;
	onward->next.family = route->family;
	__builtin_memcpy(&onward->next.address, route->ipv6_dst, 16);
	onward->device = route->ifindex;
	return true;
}

/*
 * Whether the translated packet goes to a pod on this node that takes its length; then onward->pod is
 * the way into it. Neither routes nor neighbours are asked: the agent has followed them.
 */
static __always_inline bool forward_into_pod(struct __sk_buff *ctx, const struct packet *packet,
					     struct onward *onward)
{
	struct pod_device *pod = LOOKUP(struct pod_device, pod_devices,
					&onward->after.destination);
	__u32 length = packet_length_sent(ctx, packet);

	if (!pod || !length || length > pod->mtu)
		return false;
	onward->pod = *pod;
	onward->device = onward->pod.ifindex;
	return true;
}

/* The two translations. */

/* Whether a later datagram of a request keeps its backend as things are (flow_continues). */
static __always_inline bool datagram_continues(const struct flow *known)
{
	struct settings *settings = settings_read();
	struct backend backend ALIGNED;

	return known->frontend_moves == settings->frontend_moves &&
	       backend_find(known->service, known->backend, &backend);
}

/*
 * Whether the packet's entry at ingress, of which onward->known becomes a copy, lets it pass; then
 * onward->to is the packet between the hooks. Without an entry it may be a reply.
 */
static __always_inline bool forward_first(const struct packet *packet, struct onward *onward,
					  struct flow *flow)
{
	struct flow *known = &onward->known;

	onward->to = packet->tuple;
	known->kind = 0;
	if (!flow)
		return true;
	if (!flow_copy(known, &packet->tuple, flow) || !entry_is_forwardable(known) ||
	    (known->kind != FLOW_DNAT && known->kind != FLOW_UN_SNAT))
		return false;
	onward->to = flow_translate(&packet->tuple, known);
	return known->kind != FLOW_DNAT || packet->tuple.protocol == TCP ||
	       (datagram_continues(known) && datagram_is_answered(&onward->to));
}

/*
 * The second translation, which egress would do: onward->second becomes a copy of the entry,
 * onward->after the tuple then.
 */
static __always_inline bool forward_second(struct onward *onward, struct flow *flow)
{
	struct flow *second = &onward->second;

	if (!flow || !flow_copy(second, &onward->between, flow) || !entry_is_forwardable(second) ||
	    second->kind != (onward->known.kind == FLOW_DNAT ? FLOW_SNAT : FLOW_UN_DNAT))
		return false;
	onward->after = flow_translate(&onward->between, second);
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
static __always_inline bool forward_out(struct __sk_buff *ctx, const struct packet *packet,
					struct onward *onward)
{
	if (onward->known.kind == FLOW_DNAT)
		return forward_into_pod(ctx, packet, onward) ||
		       forward_to(ctx, packet, onward, &onward->after, ctx->ifindex,
				  FORWARDED);
	return forward_to(ctx, packet, onward, &onward->after, onward->second.ifindex,
			  BPF_FIB_LOOKUP_OUTPUT);
}

/* Sets onward->device if the packet is to leave by it, and onward->to: its tuple then. */
static __always_inline void fast_forward(struct __sk_buff *ctx, const struct packet *packet,
					 struct onward *onward)
{
	struct flow *first, *second = NULL;

	if (!flows_may_exist() || !packet_is_forwardable(ctx, packet))
		return;
	first = flow_find(&packet->tuple);
	if (!forward_first(packet, onward, first))
		return;
	onward->after = onward->to;
	if (!(onward->known.kind == FLOW_DNAT && !(onward->known.flags & FLOW_MASQUERADE))) {
		onward->between = onward->to;
		onward->between.hook = HOOK_EGRESS;
		second = flow_find(&onward->between);
		if (!forward_second(onward, second))
			return;
	}
	if (!forward_out(ctx, packet, onward))
		return;
	if (first)
		forward_touch(&onward->known, first, packet, &onward->to);
	if (second)
		forward_touch(&onward->second, second, packet, &onward->after);
	onward->to = onward->after;
}

#endif

/* Translates the packet and sets onward->device, if it can; true if it is to be redirected. */
static __always_inline bool try_fast_forward(struct __sk_buff *ctx, const struct packet *packet,
					   struct onward *onward)
{
#if defined(FAST_FORWARD) && !defined(NO_LINK_HEADER)
	fast_forward(ctx, packet, onward);
	barrier();	/* all ways meet here: the verifier follows what comes next once */
	return onward->device;
#else
	return false;
#endif
}

#endif
