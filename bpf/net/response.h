/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the responses into which a packet is turned have in common: the packet's addresses are
 * exchanged, and its checksums are computed anew.
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

static __always_inline __s64 sum_of(void *from, __u32 size, __s64 seed)
{
	return bpf_csum_diff(NULL, 0, from, size, seed);
}

/* The pseudo header: mapped prefixes of both addresses add up to nothing (0xffff + 0xffff). */
static __always_inline __s64 pseudo_sum(const struct tuple *to, __u8 protocol, __u16 size)
{
	struct {
		struct address source, destination;
		__be32 size;
		__be32 protocol;
	} pseudo = { to->source, to->destination, BE32(size), BE32(protocol) };

	return sum_of(&pseudo, sizeof(pseudo), 0);
}

/* The response leaves by the device where the packet came in. */
static __always_inline void swap_link(struct __sk_buff *ctx)
{
#ifndef NO_LINK_HEADER
	__u8 link[12], swapped[12];

	bpf_skb_load_bytes(ctx, 0, link, sizeof(link));
	__builtin_memcpy(swapped, link + 6, 6);
	__builtin_memcpy(swapped + 6, link, 6);
	bpf_skb_store_bytes(ctx, 0, swapped, sizeof(swapped), 0);
#endif
}

static __always_inline void write_ip(struct __sk_buff *ctx, const struct packet *packet,
				     const struct tuple *to, __u8 protocol, __u16 size)
{
	if (packet->v6) {
		struct ipv6 ip = { .version_class_label = BE32(0x60000000),
				   .payload = BE16(size),
				   .next = protocol,
				   .hops = HOPS,
				   .source = to->source,
				   .destination = to->destination };
		bpf_skb_store_bytes(ctx, LINK, &ip, sizeof(ip), 0);
		return;
	}
	struct ipv4 ip = { .version_length = 0x45,
			   .total = BE16((__u16)(size + sizeof(ip))),
			   .fragment = IPV4_DONT,
			   .ttl = HOPS,
			   .protocol = protocol,
			   .source = to->source.word[3],
			   .destination = to->destination.word[3] };

	ip.checksum = fold(sum_of(&ip, sizeof(ip), 0));
	bpf_skb_store_bytes(ctx, LINK, &ip, sizeof(ip), 0);
}

#endif
