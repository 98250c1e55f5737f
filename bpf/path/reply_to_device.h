/* SPDX-License-Identifier: GPL-2.0 */
/*
 * With SETTING_REPLY_TO_DEVICE replies leave by the device where their requests came in, whatever
 * the routing rules say of the backend's address: they are un-DNATed as soon as they come in from
 * the backend, and redirected past routing, netfilter and conntrack; and so are ICMP errors about
 * the requests. Where the routes lead a reply to that device anyway, or its TTL is exhausted, it
 * is left to them. If it is too long for that device its sender is told, as the stack would do it.
 */
#ifndef EBPFLB_PATH_REPLY_TO_DEVICE_H
#define EBPFLB_PATH_REPLY_TO_DEVICE_H

#include "core/outcome.h"
#include "engine/flows/follow.h"
#include "net/hops.h"
#include "rules/route.h"

/* The device by which a packet would be routed, and whether its route takes the packet's length. */

#define GSO_BY_FRAGS 0xffff	/* SCTP: the segments are of different lengths */
#define LEAST_MTU 1280	/* of IPv6 (RFC 8200 5); devices that take less are rare */

/*
 * Returns the length of the IP packets that are sent (a GSO packet is cut into segments), or 0 if
 * it is unknown. Since 5.12 the kernel compares it with the route's MTU; older kernels do not check
 * GSO packets.
 */
static __always_inline __u32 packet_length_sent(struct __sk_buff *ctx, const struct packet *packet)
{
	__u32 headers = packet->transport - LINK;

	if (!ctx->gso_size)
		return packet->end - LINK;
	if (ctx->gso_size == GSO_BY_FRAGS)
		return 0;
	return headers + (packet->tuple.protocol == TCP ? packet->header : 8) + ctx->gso_size;
}

/* Returns the device by which a packet of any length is routed, or 0 if there is no route. */
static __always_inline __u32 route_device(struct __sk_buff *ctx, const struct packet *packet,
					  const struct tuple *tuple, __u32 ifindex, __u32 how)
{
	EMPTY(struct bpf_fib_lookup, route);
	long result;

	route_request(route, tuple, packet->v6, &tuple->destination, tuple->destination_port,
		      ifindex);
	result = bpf_fib_lookup(ctx, route, sizeof(*route), how);
	return is_routed(result) ? route->ifindex : 0;
}

/* Whether the sender of a too long packet can be told; if not, the stack may fragment it. */
static __always_inline bool may_be_told(struct __sk_buff *ctx, const struct packet *packet)
{
	__be16 fragment;

	if (packet->piece != WHOLE || packet->options)
		return false;
	return packet->v6 ||
	       (!bpf_skb_load_bytes(ctx, LINK + IPV4_FRAGMENT, &fragment, sizeof(fragment)) &&
		fragment & IPV4_DONT);
}

/*
 * Whether there is a route through this device that takes the packet. If the packet is too long,
 * onward->mtu is set, and the sender gets an ICMP error. Kernels before 5.12 do not report the MTU. There
 * the sender of a packet longer than LEAST_MTU is told LEAST_MTU; any other sender gets no error.
 */
static __always_inline bool device_takes(struct __sk_buff *ctx, const struct packet *packet,
					 struct onward *onward, const struct tuple *tuple,
					 __u32 ifindex)
{
	__u32 length = packet_length_sent(ctx, packet);
	EMPTY(struct bpf_fib_lookup, route);
	__u32 mtu;
	long result;

	route_request(route, tuple, packet->v6, &tuple->destination, tuple->destination_port,
		      ifindex);
	route->tot_len = length;
	result = bpf_fib_lookup(ctx, route, sizeof(*route), BPF_FIB_LOOKUP_OUTPUT);
	if (result == BPF_FIB_LKUP_RET_SUCCESS || result == BPF_FIB_LKUP_RET_NO_NEIGH)
		return route->ifindex == ifindex;
	/* The kernel writes mtu_result to tot_len; older headers do not have that name. */
	mtu = route->tot_len < length ? route->tot_len : LEAST_MTU;
	if (result == BPF_FIB_LKUP_RET_FRAG_NEEDED && mtu < length && may_be_told(ctx, packet) &&
	    route_device(ctx, packet, tuple, ifindex, BPF_FIB_LOOKUP_OUTPUT) == ifindex)
		onward->mtu = mtu;
	return false;
}

/*
 * The entry by which egress would un-DNAT this packet, from backend to client; onward->second becomes
 * a copy of it.
 */
static __always_inline struct flow *reply_entry_of(const struct tuple *tuple, struct onward *onward)
{
	struct flow *flow;

	onward->between = *tuple;
	onward->between.hook = HOOK_EGRESS;
	flow = flow_find(&onward->between);
	return flow && flow_copy(&onward->second, &onward->between, flow) &&
		       onward->second.kind == FLOW_UN_DNAT ? flow : NULL;
}

static __always_inline bool replies_go_to_device(void)
{
	return settings_read()->flags & SETTING_REPLY_TO_DEVICE;
}

/* Whether routing would send this packet, with its current tuple, elsewhere than to `ifindex`. */
static __always_inline bool leads_elsewhere(struct __sk_buff *ctx, const struct packet *packet,
					    const struct tuple *tuple, __u32 ifindex)
{
	return ifindex != ctx->ifindex && hops_are_left(ctx, packet->v6) &&
	       route_device(ctx, packet, tuple, ctx->ifindex, FORWARDED) != ifindex;
}

/*
 * Whether a reply, by now from backend to client (onward->to), has to leave by another device than the
 * one to which it is routed. Then it is un-DNATed, and onward->device is set; or onward->mtu, if it is
 * too long for that device. A packet without a link header cannot be redirected.
 */
static __always_inline bool reply_leads_to_device(struct __sk_buff *ctx,
						  const struct packet *packet,
						  struct onward *onward)
{
#ifdef NO_LINK_HEADER
	return false;
#else
	struct flow *flow, *entry = &onward->second;

	if (!replies_go_to_device())
		return false;
	flow = reply_entry_of(&onward->to, onward);
	if (!flow || !leads_elsewhere(ctx, packet, &onward->to, entry->ifindex))
		return false;
	onward->after = flow_translate(&onward->between, entry);
	if (!device_takes(ctx, packet, onward, &onward->after, entry->ifindex))
		return false;
	flow_touch(entry, flow, packet, &onward->after);
	onward->to = onward->after;
	onward->device = entry->ifindex;
	record_at(STEP_REPLY_DEVICE, entry->ifindex, &entry->address);
	return true;
#endif
}

/*
 * The same of an ICMP error from the backend, or a router before it, about a packet of the client.
 * onward->to is the error between the hooks, related->quoted the packet that it quotes; both become what
 * the client knows.
 */
static __always_inline void error_lead_to_device(struct __sk_buff *ctx,
						 const struct packet *packet,
						 struct onward *onward, struct related *related)
{
#ifndef NO_LINK_HEADER
	struct tuple *to = &onward->to, *quoted = &related->quoted;
	struct flow *entry = &onward->second;

	tuple_write_reverse(&related->reply_tuple, quoted, HOOK_EGRESS);
	if (!replies_go_to_device() || !reply_entry_of(&related->reply_tuple, onward) ||
	    !leads_elsewhere(ctx, packet, to, entry->ifindex))
		return;
	if (address_equal(&to->source, &quoted->destination))
		to->source = entry->address;
	if (route_device(ctx, packet, to, entry->ifindex, BPF_FIB_LOOKUP_OUTPUT) != entry->ifindex)
		return;
	onward->after = flow_translate(&onward->between, entry);
	tuple_write_reverse(quoted, &onward->after, 0);
	onward->device = entry->ifindex;
	record_at(STEP_REPLY_DEVICE, entry->ifindex, &entry->address);
#endif
}

#endif
