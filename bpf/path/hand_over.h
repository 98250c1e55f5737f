/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Which node gets a request that is handed over by MAC address (docs/client-addresses.md):
 *
 *   a flow keeps its node while packets may be handed to it. Once the node is not in the frontend's block
 *   any more, datagrams get another one, but a connection stays: its endpoint may still serve it
 *   any other request draws a node from the block, by a hash that all nodes compute alike: so a flow goes
 *   on when its packets come in by another node, or when its entry is lost
 *
 * This node can be drawn, too: then the packet goes on to path/ingress.h, which checks source ranges.
 * They are checked here before a flow gets another node.
 *
 * A connection that opens is remembered apart until its second packet, so that a flood of SYNs makes no
 * other connection forget its node.
 */
#ifndef EBPFLB_PATH_HAND_OVER_H
#define EBPFLB_PATH_HAND_OVER_H

#include "core/check.h"
#include "core/client.h"
#include "core/note.h"
#include "core/tuple.h"
#include "maps/handed.h"
#include "net/hops.h"
#include "net/packet.h"
#include "net/icmp_error.h"
#include "net/response.h"
#include "path/fragment.h"
#include "rules/frontend.h"
#include "rules/policy.h"
#include "rules/route.h"

#define THIS_NODE 0	/* in place of a MAC address */

/* The MAC address at the beginning of a value, with its padding. */
static __always_inline __u64 mac_in(const void *value)
{
	__u64 mac;

	__builtin_memcpy(&mac, value, sizeof(mac));
	return mac;
}

/* Returns the hop with this MAC address if packets of the tuple's family may be handed to it here. */
static __always_inline const struct hop *hop_find(const struct __sk_buff *ctx, __u64 mac, bool v6)
{
	const struct hop *hop = LOOKUP(struct hop, hops, &mac);

	return hop && hop->ifindex == ctx->ifindex && hop->families & (v6 ? HOP_IPV6 : HOP_IPV4)
		       ? hop : NULL;
}

/* Whether the frame has come from a node: one hand-over is enough. */
static __always_inline bool frame_is_from_node(struct __sk_buff *ctx)
{
	struct link_addresses link;
	__u64 mac = 0;

	if (!HEADER_READ(ctx, 0, &link))
		return true;
	__builtin_memcpy(&mac, link.source, sizeof(link.source));
	return LOOKUP(struct hop, hops, &mac) != NULL;
}

/* A request on its way to a node. `remembers`: its flow is noted; errors and pings open none. */
struct handing {
	const struct tuple *tuple;	/* of the request, at ingress */
	const struct handed_frontend *frontend;
	__u64 node;	/* the result: a MAC address, or THIS_NODE */
	bool v6;
	bool opens;	/* a SYN */
	bool remembers;
};

static __always_inline void *handed_flows(const struct tuple *tuple)
{
	return tuple->protocol == TCP ? MAP(handed_connections) : MAP(handed_datagrams);
}

static __always_inline void handing_remember(const struct handing *to)
{
	struct handed_flow flow ALIGNED = { .block = to->frontend->block };
	void *map = to->opens ? MAP(handed_openings) : handed_flows(to->tuple);

	if (!to->remembers)
		return;
	__builtin_memcpy(flow.mac, &to->node, sizeof(to->node));
	flow.check = check_of(CHECK_SUM(to->tuple, &flow));
	if (to->opens)
		bpf_map_delete_elem(MAP(handed_connections), to->tuple);
	bpf_map_update_elem(map, to->tuple, &flow, BPF_ANY);
}

static __always_inline bool block_has(__u32 block, __u64 mac)
{
	struct handed_place place = { .block = block };

	__builtin_memcpy(place.mac, &mac, sizeof(mac));
	return LOOKUP(__u32, handed_members, &place) != NULL;
}

/* Copies what is remembered of the flow; false if nothing is. `is_new`: it has only opened. */
static __always_inline bool handed_find_flow(const struct handing *to, struct handed_flow *known,
					     bool *is_new)
{
	struct handed_flow *found = bpf_map_lookup_elem(handed_flows(to->tuple), to->tuple);

	*is_new = false;
	if (!found && to->tuple->protocol == TCP) {
		found = LOOKUP(struct handed_flow, handed_openings, to->tuple);
		*is_new = true;
	}
	return found && COPY_CHECKED(known, to->tuple, found);
}

/* Whether the flow has a node that it keeps. */
static __always_inline bool handing_is_known(struct __sk_buff *ctx, struct handing *to)
{
	struct handed_flow known ALIGNED;
	__u32 block = to->frontend->block;
	bool is_new;

	if (!handed_find_flow(to, &known, &is_new))
		return false;
	to->node = mac_in(&known);
	if (to->node && !hop_find(ctx, to->node, to->v6))
		return false;
	if (known.block != block && !block_has(block, to->node))
		return to->tuple->protocol == TCP && !to->opens;
	if ((known.block != block || is_new) && !to->opens)
		handing_remember(to);
	return true;
}

/*
 * Whether the address is the cluster's by its route here: a pod's, on this node or behind a tunnel or
 * another node. A Service may claim it, but answers to the pod's own connections come there, too; a node's
 * addresses, and podCIDRs, have no frontend here. Addresses of load balancers have no route, or lead back.
 */
static __always_inline bool address_is_of_pod(struct __sk_buff *ctx, const struct handing *to)
{
	const struct tuple *tuple = to->tuple;
	EMPTY(struct bpf_fib_lookup, route);
	__u64 mac = 0;
	long result;

	route_request(route, tuple, to->v6, &tuple->destination, tuple->destination_port, ctx->ifindex);
	result = bpf_fib_lookup(ctx, route, sizeof(*route), FORWARDED);
	if (result == BPF_FIB_LKUP_RET_UNSUPP_LWT || (is_routed(result) && route->ifindex != ctx->ifindex))
		return true;
	__builtin_memcpy(&mac, route->dmac, sizeof(route->dmac));
	return result == BPF_FIB_LKUP_RET_SUCCESS && LOOKUP(struct hop, hops, &mac);
}

/* Whether the client may reach the service from another node, where nothing is checked again. */
static __always_inline bool handing_is_admitted(struct __sk_buff *ctx, const struct handing *to,
						const struct frontend *frontend,
						struct service *service)
{
	struct request request = { .packet = ctx,
				   .tuple = to->tuple,
				   .settings = settings_read(),
				   .ifindex = ctx->ifindex };

	return service_read(frontend, service, NULL) == FOUND &&
	       !(service->flags & SERVICE_UNTRACKED) && !client_is_local(&request) &&
	       policy_admits(service, &to->tuple->source) && !address_is_of_pod(ctx, to);
}

/* Draws a node from the block; returns false if the place was given to another block meanwhile. */
static __always_inline bool handing_draw(struct handing *to)
{
	const struct handed_frontend *frontend = to->frontend;
	__u32 hash = frontend->by_client ? address_mix(&to->tuple->source)
					 : tuple_hash(to->tuple, 0);
	__u32 at = frontend->base + (__u32)((__u64)hash * frontend->size >> 32);
	const struct handed_place *place = LOOKUP_NUMBER(struct handed_place, handed_places, at);

	if (!place || place->block != frontend->block)
		return false;
	to->node = mac_in(place);
	return true;
}

/* Whether to->node is another node, which gets the packet. */
static __always_inline bool handing_find(struct __sk_buff *ctx, struct handing *to,
					 const struct frontend *frontend, struct service *service)
{
	if (handing_is_known(ctx, to))
		return to->node != THIS_NODE;
	to->node = THIS_NODE;
	if (to->frontend->size && !handing_draw(to))
		return false;
	if (to->node && (!hop_find(ctx, to->node, to->v6) ||
			 !handing_is_admitted(ctx, to, frontend, service)))
		return false;
	handing_remember(to);
	return to->node != THIS_NODE;
}

/*
 * Whether requests to an address that ends in these words may be handed over; as bit_of in
 * ebpflb/kernel/handing.py. The agent sets a bit before it writes the first frontend of its addresses,
 * and clears it after the last one.
 */
static __always_inline bool address_may_be_handed(__u64 words)
{
	__u64 bit = words * 0x9e3779b97f4a7c15 >> 49;
	const struct address_bits *all = ONLY_VALUE(struct address_bits, handed_addresses);

	return (__s64)(all->words[bit / 64] << bit % 64) < 0;
}

/*
 * Whether the packet is of any interest here; so all others cost little, and as much in IPv6, which
 * takes longer and so is first. Those with one hop left may be tests (path/leg_test.h), and what lies in
 * pieces is read whole.
 */
static __always_inline bool packet_may_be_handed(struct __sk_buff *ctx)
{
	const void *at = (void *)(long)ctx->data + LINK, *end = (void *)(long)ctx->data_end;
	const struct ipv4 *v4 = at;
	const struct ipv6 *v6 = at;
	__u64 protocol = ctx->protocol;

	if (protocol == BE16(ETHERTYPE_IPV6))
		return (const void *)(v6 + 1) > end || v6->hops == 1 ||
		       address_may_be_handed(*(const __u64 *)(v6->destination.word + 2));
	OPAQUE(protocol);
	if (protocol == BE16(ETHERTYPE_IPV4))
		return (const void *)(v4 + 1) > end || v4->ttl == 1 ||
		       address_may_be_handed(v4->destination);
	OPAQUE(protocol);
	return protocol == BE16(ETHERTYPE_VLAN) || protocol == BE16(ETHERTYPE_SERVICE_VLAN);
}

static __always_inline const struct handed_frontend *handed_find(const struct frontend *frontend)
{
	return frontend_may_exist(frontend)
		       ? LOOKUP(struct handed_frontend, handed_frontends, frontend) : NULL;
}

/*
 * Sends the frame to the hop: its MAC addresses and TTL change, nothing else. Returns false, without any
 * change, if the TTL ends here: then the stack answers, where it routes the packet.
 */
static __always_inline bool hand_to(struct __sk_buff *ctx, const struct hop *hop, __u64 mac, bool v6)
{
	struct link_addresses link;

	if (!hops_are_left(ctx, v6))
		return false;
	if (ctx->vlan_present)	/* a priority: no VLAN */
		bpf_skb_vlan_pop(ctx);
	hops_decrement(ctx, v6);
	__builtin_memcpy(link.destination, &mac, sizeof(link.destination));
	__builtin_memcpy(link.source, hop->own_mac, sizeof(link.source));
	note_write(ctx, NOTE_TRANSLATED);	/* at egress it would seem to be of a connection that is lost */
	return !bpf_skb_store_bytes(ctx, 0, &link, sizeof(link), 0);
}

#endif
