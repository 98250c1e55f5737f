/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The source address of a masqueraded request: the one that the kernel's route to the backend would
 * select, by the route's own source (src), by the next hop, or for IPv6 by RFC 6724. Where programs
 * cannot ask for it (before 6.7) it is the device's own (map devices).
 */
#ifndef EBPFLB_RULES_ROUTE_H
#define EBPFLB_RULES_ROUTE_H

#include "core/client.h"

/*
 * Flags of bpf_fib_lookup: skip the neighbour (6.3), return the route's source (6.7), use the
 * packet's mark for routing rules (6.10).
 */
#define FIB_SKIP_NEIGHBOUR 4
#define FIB_SOURCE 16
#define FIB_MARK 32
#define FORWARDED 0	/* the packet came in by the device; or else BPF_FIB_LOOKUP_OUTPUT */

#define EINVAL 22

/* Fills an empty request. */
static __always_inline void route_request(struct bpf_fib_lookup *route, const struct tuple *tuple,
					  bool v6, const struct address *destination,
					  __be16 port, __u32 ifindex)
{
	route->family = v6 ? FAMILY_V6 : FAMILY_V4;
	route->l4_protocol = tuple->protocol;
	route->sport = tuple->source_port;
	route->dport = port;
	route->ifindex = ifindex;
	if (v6) {
		__builtin_memcpy(route->ipv6_src, &tuple->source, 16);
		__builtin_memcpy(route->ipv6_dst, destination, 16);
	} else {
		route->ipv4_src = tuple->source.word[3];
		route->ipv4_dst = destination->word[3];
	}
}

/*
 * Returns -EINVAL on kernels without FIB_SOURCE. The mark shares a field with the MAC address of
 * the result.
 */
static __always_inline long route_ask(struct __sk_buff *ctx, struct bpf_fib_lookup *route,
				      __u32 mark, __u32 flags)
{
	long result;

	flags |= FIB_SOURCE | FIB_SKIP_NEIGHBOUR;
	if (mark) {
		__builtin_memcpy(route->smac, &mark, sizeof(mark));
		result = bpf_fib_lookup(ctx, route, sizeof(*route), flags | FIB_MARK);
		if (result != -EINVAL)
			return result;
	}
	return bpf_fib_lookup(ctx, route, sizeof(*route), flags);
}

static __always_inline bool is_routed(long result)
{
	return result == BPF_FIB_LKUP_RET_SUCCESS || result == BPF_FIB_LKUP_RET_FRAG_NEEDED ||
	       result == BPF_FIB_LKUP_RET_NO_NEIGH;
}

static __always_inline void route_answer(const struct bpf_fib_lookup *route,
					 struct address *source)
{
	if (route->family == FAMILY_V4)
		*source = address_from_v4(route->ipv4_src);
	else
		__builtin_memcpy(source, route->ipv6_src, 16);
	record_at(STEP_SOURCE, STEP_BY_ROUTE, source);
}

/* Reads the device's own source. The source is unspecified if there is none. */
static __always_inline void device_source(__u32 ifindex, bool v6, struct address *source)
{
	struct device *device = LOOKUP_NUMBER(struct device, devices, ifindex);

	if (device)
		*source = v6 ? device->v6 : device->v4;
	record_at(STEP_SOURCE, STEP_BY_DEVICES, source);
}

/*
 * Finds the source for a request that is about to leave by this device. The source is unspecified
 * if there is none. For IPv6 the kernel may find a route by another device if none leads there by
 * this one.
 */
static __always_inline void route_source_here(struct __sk_buff *ctx, const struct packet *packet,
					      struct address *source)
{
	const struct address *to = &packet->tuple.destination;
	EMPTY(struct bpf_fib_lookup, route);
	long result;

	route_request(route, &packet->tuple, packet->v6, to, packet->tuple.destination_port,
		      ctx->ifindex);
	result = route_ask(ctx, route, ctx->mark, BPF_FIB_LOOKUP_OUTPUT);
	*source = (struct address){};
	if (is_routed(result) && route->ifindex == ctx->ifindex)
		route_answer(route, source);
	if (address_is_any(source))
		device_source(ctx->ifindex, packet->v6, source);
}

#endif
