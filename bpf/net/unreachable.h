/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Turns a packet into a "port unreachable" that quotes its head (RFC 792, RFC 4443 3.1), or, with
 * an MTU, into a "packet too big" (RFC 1191 4, RFC 4443 3.2).
 */
#ifndef EBPFLB_NET_UNREACHABLE_H
#define EBPFLB_NET_UNREACHABLE_H

#include "net/response.h"

#define UNREACHABLE 3
#define PORT 3
#define FRAGMENTATION_NEEDED 4
#define UNREACHABLE_V6 1
#define PORT_V6 4
#define TOO_BIG_V6 2

/* The IP header and the first 8 bytes of the transport header, which hold the ports. */
struct unreachable_v4 {
	struct icmp head;
	__u8 quote[28];
};

struct unreachable_v6 {
	struct icmp head;
	__u8 quote[48];
};

static __always_inline bool respond_unreachable_v4(struct __sk_buff *ctx,
						  const struct packet *packet,
						  const struct tuple *to, __u16 mtu)
{
	EMPTY(struct unreachable_v4, icmp);

	icmp->head.type = UNREACHABLE;
	icmp->head.code = mtu ? FRAGMENTATION_NEEDED : PORT;
	icmp->head.rest = BE32(mtu);

	if (bpf_skb_load_bytes(ctx, LINK, icmp->quote, sizeof(icmp->quote)) ||
	    bpf_skb_change_tail(ctx, LINK + sizeof(struct ipv4) + sizeof(*icmp), 0))
		return false;
	icmp->head.checksum = fold(sum_of(icmp, sizeof(*icmp), 0));
	write_ip(ctx, packet, to, ICMP, sizeof(*icmp));
	return !bpf_skb_store_bytes(ctx, LINK + sizeof(struct ipv4), icmp, sizeof(*icmp), 0);
}

/*
 * The datagram's checksum field becomes an unused field, which must be 0 when the message is summed
 * up. If a device still has to compute the datagram's checksum, it makes the field 0 again
 * (0xffff).
 */
static __always_inline bool unreachable_checksum_v6(struct __sk_buff *ctx, __s64 pseudo)
{
	const __u32 at = LINK + sizeof(struct ipv6) + UDP_CHECKSUM;
	EMPTY(__u16, sum);

	*sum = folded(pseudo);
	return !bpf_skb_store_bytes(ctx, at, sum, sizeof(*sum), 0) &&
	       !bpf_l4_csum_replace(ctx, at, 0, *sum, 0);
}

static __always_inline bool respond_unreachable_v6(struct __sk_buff *ctx,
						  const struct packet *packet,
						  const struct tuple *to, __u16 mtu)
{
	EMPTY(struct unreachable_v6, icmp);
	__s64 pseudo = pseudo_sum(to, ICMPV6, sizeof(*icmp));

	icmp->head.type = mtu ? TOO_BIG_V6 : UNREACHABLE_V6;
	icmp->head.code = mtu ? 0 : PORT_V6;
	icmp->head.rest = BE32(mtu);

	if (bpf_skb_load_bytes(ctx, LINK, icmp->quote, sizeof(icmp->quote)) ||
	    bpf_skb_change_tail(ctx, LINK + sizeof(struct ipv6) + sizeof(*icmp), 0))
		return false;
	icmp->head.checksum = fold(sum_of(icmp, sizeof(*icmp), pseudo));
	write_ip(ctx, packet, to, ICMPV6, sizeof(*icmp));
	return !bpf_skb_store_bytes(ctx, LINK + sizeof(struct ipv6), icmp, sizeof(*icmp), 0) &&
	       (mtu || unreachable_checksum_v6(ctx, pseudo));
}

#endif
