/* SPDX-License-Identifier: GPL-2.0 */
/* What routing does to the TTL or hop limit of a packet that is redirected past it. */
#ifndef EBPFLB_NET_HOPS_H
#define EBPFLB_NET_HOPS_H

#include "net/packet.h"

/* Whether there is one to spare: else the stack has to answer that the packet's time is over. */
static __always_inline bool hops_are_left(struct __sk_buff *ctx, const struct packet *packet)
{
	__u32 at = LINK + (packet->v6 ? IPV6_HOPS : IPV4_TTL);
	__u8 hops;

	return !bpf_skb_load_bytes(ctx, at, &hops, sizeof(hops)) && hops > 1;
}

static __always_inline void hops_decrement(struct __sk_buff *ctx, const struct packet *packet)
{
	__u32 at = LINK + (packet->v6 ? IPV6_HOPS : IPV4_TTL);
	__u8 word[2] = {};
	__u16 before, after;

	if (bpf_skb_load_bytes(ctx, at, word, sizeof(word)))
		return;
	__builtin_memcpy(&before, word, sizeof(before));
	word[0]--;
	__builtin_memcpy(&after, word, sizeof(after));
	if (!packet->v6)
		bpf_l3_csum_replace(ctx, LINK + IPV4_CHECKSUM, before, after, sizeof(after));
	bpf_skb_store_bytes(ctx, at, word, 1, 0);
}

#endif
