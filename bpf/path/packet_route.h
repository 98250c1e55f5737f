/* SPDX-License-Identifier: GPL-2.0 */
/* The device by which a packet would be routed, and whether its route takes the packet's length. */
#ifndef EBPFLB_PATH_PACKET_ROUTE_H
#define EBPFLB_PATH_PACKET_ROUTE_H

#include "rules/route.h"

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

#endif
