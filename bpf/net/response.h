/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The part that all responses made from a packet have in common: the packet's addresses are
 * exchanged, and its checksums are computed again.
 *
 * A program cannot see whether the packet's own checksum still has to be computed
 * (CHECKSUM_PARTIAL). In that case a device without TX checksum offload sums up the response from
 * its transport header on, and writes the result where the packet had its checksum. It needs the
 * pseudo header's sum there. In the other case the field must already be complete.
 * bpf_l4_csum_replace without BPF_F_PSEUDO_HDR changes a field in the second case only.
 */
#ifndef EBPFLB_NET_RESPONSE_H
#define EBPFLB_NET_RESPONSE_H

#include "net/packet.h"

#define HOPS 64

static __always_inline __u16 fold(__s64 sum)
{
	sum = (sum & 0xffff) + (sum >> 16 & 0xffff) + (sum >> 32 & 0xffff);
	sum = (sum & 0xffff) + (sum >> 16);
	return ~((sum & 0xffff) + (sum >> 16));
}

static __always_inline __u16 folded(__s64 sum)
{
	return ~fold(sum);
}

static __always_inline __s64 sum_of(void *from, __u32 size, __s64 seed)
{
	return bpf_csum_diff(NULL, 0, from, size, seed);
}

struct pseudo_header {
	struct address source;
	struct address destination;
	__be32 size;
	__be32 protocol;
};

/* Sums the pseudo header. The mapped prefixes of both addresses add up to zero. */
static __always_inline __s64 pseudo_sum(const struct tuple *to, __u8 protocol, __u16 size)
{
	EMPTY(struct pseudo_header, pseudo);

	pseudo->source = to->source;
	pseudo->destination = to->destination;
	pseudo->size = BE32(size);
	pseudo->protocol = BE32(protocol);
	return sum_of(pseudo, sizeof(*pseudo), 0);
}

/* The beginning of a link header: MAC addresses. */
struct link_addresses {
	__u8 destination[6];
	__u8 source[6];
};

/* Swaps the MAC addresses: the response leaves by the device where the packet came in. */
static __always_inline void swap_link(struct __sk_buff *ctx)
{
#ifndef NO_LINK_HEADER
	EMPTY(struct link_addresses, link);
	EMPTY(struct link_addresses, swapped);

	bpf_skb_load_bytes(ctx, 0, link, sizeof(*link));
	__builtin_memcpy(swapped->destination, link->source, sizeof(link->source));
	__builtin_memcpy(swapped->source, link->destination, sizeof(link->destination));
	bpf_skb_store_bytes(ctx, 0, swapped, sizeof(*swapped), 0);
#endif
}

static __always_inline void write_ipv6(struct __sk_buff *ctx, const struct tuple *to,
				       __u8 protocol, __u16 size)
{
	EMPTY(struct ipv6, ip);

	ip->version_class_label = BE32(0x60000000);
	ip->payload = BE16(size);
	ip->next = protocol;
	ip->hops = HOPS;
	ip->source = to->source;
	ip->destination = to->destination;
	bpf_skb_store_bytes(ctx, LINK, ip, sizeof(*ip), 0);
}

static __always_inline void write_ipv4(struct __sk_buff *ctx, const struct tuple *to,
				       __u8 protocol, __u16 size)
{
	EMPTY(struct ipv4, ip);

	ip->version_length = 0x45;
	ip->total = BE16((__u16)(size + sizeof(*ip)));
	ip->fragment = IPV4_DONT;
	ip->ttl = HOPS;
	ip->protocol = protocol;
	ip->source = to->source.word[3];
	ip->destination = to->destination.word[3];
	ip->checksum = fold(sum_of(ip, sizeof(*ip), 0));
	bpf_skb_store_bytes(ctx, LINK, ip, sizeof(*ip), 0);
}

static __always_inline void write_ip(struct __sk_buff *ctx, const struct packet *packet,
				     const struct tuple *to, __u8 protocol, __u16 size)
{
	if (packet->v6)
		write_ipv6(ctx, to, protocol, size);
	else
		write_ipv4(ctx, to, protocol, size);
}

#endif
