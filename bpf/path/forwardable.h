/* SPDX-License-Identifier: GPL-2.0 */
/* Which packets may bypass the stack with --fast-forward, and by which device they leave. */
#ifndef EBPFLB_PATH_FORWARDABLE_H
#define EBPFLB_PATH_FORWARDABLE_H

#include "engine/flows/table.h"
#include "net/hops.h"
#include "path/packet_route.h"

#ifdef FAST_FORWARD

#define REFRESH(time) ((time) >> 33)	/* ns: a number that changes every 8.6 s */
#define TO_THIS_HOST 0		/* PACKET_HOST: the frame has the device's MAC address */
#define UNANSWERED 1		/* a length that fits every route, and is not any route's MTU */

static __always_inline bool packet_is_forwardable(struct __sk_buff *ctx,
						  const struct packet *packet)
{
	__u8 protocol = packet->tuple.protocol;

	if (protocol != UDP && (protocol != TCP || packet->control & TCP_SYN || packet->ends))
		return false;
	return ctx->pkt_type == TO_THIS_HOST && packet->piece == WHOLE && !packet->options &&
	       hops_are_left(ctx, packet);
}

/* Whether the entry belongs to an answered flow that conntrack has seen lately. */
static __always_inline bool entry_is_forwardable(const struct flow *entry)
{
	return entry->flags & FLOW_SEEN &&
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

#endif

#endif
