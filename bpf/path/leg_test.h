/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Tests of the two legs of a hand-over (docs/client-addresses.md): a node asks another one by a frame
 * to its MAC address, from a client's address to a load balancer address, and the answer has these
 * addresses exchanged. So both nodes have sent what a network that forbids others' addresses drops.
 *
 * Anybody may ask. The answer goes to the MAC address of the question, is as long and not longer, and
 * both end at the first router, by their TTL. No host answers these types of ICMP, nor by an error.
 */
#ifndef EBPFLB_PATH_LEG_TEST_H
#define EBPFLB_PATH_LEG_TEST_H

#include "net/neighbour.h"
#include "net/response.h"

#define LEG_UNANSWERED -1
#define LEG_LONGEST 128		/* bytes of a frame */
#define LEG_ICMP 253		/* for experiments (RFC 4727) */
#define LEG_ICMPV6 100		/* for private experiments (RFC 4443 2.1) */
#define LEG_QUESTION 0		/* codes */
#define LEG_ANSWER 1

/* Whether a single station asks: the answer must not go to a group. */
static __always_inline bool leg_asks(struct __sk_buff *ctx, __u32 at, __u8 type)
{
	EMPTY(struct icmp, icmp);
	EMPTY(struct link_addresses, link);

	return !bpf_skb_load_bytes(ctx, at, icmp, sizeof(*icmp)) && icmp->type == type &&
	       icmp->code == LEG_QUESTION && !bpf_skb_load_bytes(ctx, 0, link, sizeof(*link)) &&
	       !(link->source[0] & GROUP_BIT);
}

/* Type and code are one number of the checksum; addresses that change places do not change it. */
static __always_inline int leg_answer(struct __sk_buff *ctx, __u32 at, __u8 type)
{
	__u8 code = LEG_ANSWER;

	bpf_l4_csum_replace(ctx, at + ICMP_CHECKSUM, BE16(type << 8 | LEG_QUESTION),
			    BE16(type << 8 | LEG_ANSWER), 2);
	bpf_skb_store_bytes(ctx, at + 1, &code, sizeof(code), 0);
	swap_link(ctx);
	return bpf_redirect(ctx->ifindex, 0);
}

static __always_inline int leg_answer_v4(struct __sk_buff *ctx)
{
	const __u32 at = LINK + sizeof(struct ipv4);
	__be32 swapped[2];

	EMPTY(struct ipv4, ip);
	if (bpf_skb_load_bytes(ctx, LINK, ip, sizeof(*ip)) || ip->version_length != 0x45 ||
	    ip->protocol != 1 || ip->ttl != 1 || !leg_asks(ctx, at, LEG_ICMP))
		return LEG_UNANSWERED;
	swapped[0] = ip->destination;
	swapped[1] = ip->source;
	bpf_skb_store_bytes(ctx, LINK + IPV4_ADDRESSES, swapped, sizeof(swapped), 0);
	return leg_answer(ctx, at, LEG_ICMP);
}

static __always_inline int leg_answer_v6(struct __sk_buff *ctx)
{
	const __u32 at = LINK + sizeof(struct ipv6);
	struct address swapped[2];

	EMPTY(struct ipv6, ip);
	if (bpf_skb_load_bytes(ctx, LINK, ip, sizeof(*ip)) || ip->next != ICMPV6 ||
	    ip->hops != 1 || !leg_asks(ctx, at, LEG_ICMPV6))
		return LEG_UNANSWERED;
	swapped[0] = ip->destination;
	swapped[1] = ip->source;
	bpf_skb_store_bytes(ctx, LINK + IPV6_ADDRESSES, swapped, sizeof(swapped), 0);
	return leg_answer(ctx, at, LEG_ICMPV6);
}

/* Returns LEG_UNANSWERED for everything but a question to this node. */
static __always_inline int leg_test_answer(struct __sk_buff *ctx)
{
	if (ctx->len > LEG_LONGEST || ctx->pkt_type || ctx->vlan_present)
		return LEG_UNANSWERED;
	if (ctx->protocol == BE16(ETHERTYPE_IPV4))
		return leg_answer_v4(ctx);
	return ctx->protocol == BE16(ETHERTYPE_IPV6) ? leg_answer_v6(ctx) : LEG_UNANSWERED;
}

#endif
