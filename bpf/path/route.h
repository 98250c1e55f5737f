/* SPDX-License-Identifier: GPL-2.0 */
/* The address that the kernel's route to a backend would give a masqueraded request as its source. */
#ifndef EBPFLB_PATH_ROUTE_H
#define EBPFLB_PATH_ROUTE_H

#include "engine/flows/masquerade.h"
#include "path/client.h"

/* Flags of bpf_fib_lookup: without the neighbour (6.3), and with the route's source (6.7). */
#define FIB_SKIP_NEIGHBOUR 4
#define FIB_SOURCE 16

#define EINVAL 22

/* ROUTE_HERE: to this node itself, where nothing is masqueraded. */
enum route_source { ROUTE_SOURCE, ROUTE_HERE, ROUTE_UNKNOWN };

static __always_inline struct bpf_fib_lookup route_request(const struct packet *packet,
							   const struct backend *backend,
							   __u32 ifindex)
{
	struct bpf_fib_lookup route = { .family = packet->v6 ? FAMILY_V6 : FAMILY_V4,
					.l4_protocol = packet->tuple.protocol,
					.sport = packet->tuple.source_port,
					.dport = backend->port,
					.ifindex = ifindex };

	if (packet->v6) {
		__builtin_memcpy(route.ipv6_src, &packet->tuple.source, 16);
		__builtin_memcpy(route.ipv6_dst, &backend->address, 16);
	} else {
		route.ipv4_src = packet->tuple.source.word[3];
		route.ipv4_dst = backend->address.word[3];
	}
	return route;
}

/*
 * Routes that a mark in PREROUTING would choose are not known yet: marks are not asked for. Kernels
 * without FIB_SOURCE reject it; there it is the address of the device by which the route leaves.
 */
static __always_inline enum route_source route_source(struct __sk_buff *ctx,
						      const struct packet *packet,
						      const struct backend *backend,
						      struct address *source)
{
	struct bpf_fib_lookup route = route_request(packet, backend, ctx->ifindex);
	long result = bpf_fib_lookup(ctx, &route, sizeof(route), FIB_SOURCE | FIB_SKIP_NEIGHBOUR);
	bool has_source = result != -EINVAL;

	if (!has_source)
		result = bpf_fib_lookup(ctx, &route, sizeof(route), 0);
	if (result == BPF_FIB_LKUP_RET_NOT_FWDED || result == BPF_FIB_LKUP_RET_FWD_DISABLED)
		return ROUTE_HERE;
	if (result != BPF_FIB_LKUP_RET_SUCCESS && result != BPF_FIB_LKUP_RET_FRAG_NEEDED &&
	    result != BPF_FIB_LKUP_RET_NO_NEIGH)
		return ROUTE_UNKNOWN;
	if (!has_source)
		*source = masquerade_address(route.ifindex, packet->v6);
	else if (packet->v6)
		__builtin_memcpy(source, route.ipv6_src, 16);
	else
		*source = address_from_v4(route.ipv4_src);
	return address_is_any(source) ? ROUTE_UNKNOWN : ROUTE_SOURCE;
}

#endif
