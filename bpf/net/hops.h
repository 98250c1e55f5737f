/* SPDX-License-Identifier: GPL-2.0 */
/* Updates the TTL or hop limit like routing does, for a packet that is redirected past it. */
#ifndef EBPFLB_NET_HOPS_H
#define EBPFLB_NET_HOPS_H

#include "net/packet.h"

/* The TTL or hop limit; 0 if it cannot be read. */
static __always_inline __u8 hops_read(struct __sk_buff *ctx, bool v6)
{
	__u8 hops = 0;

	bpf_skb_load_bytes(ctx, LINK + (v6 ? IPV6_HOPS : IPV4_TTL), &hops, sizeof(hops));
	return hops;
}

/* Whether a hop may be subtracted: if not, the stack has to answer with "time exceeded". */
static __always_inline bool hops_are_left(struct __sk_buff *ctx, bool v6)
{
	return hops_read(ctx, v6) > 1;
}

static __always_inline void hops_decrement(struct __sk_buff *ctx, bool v6)
{
	__u32 at = LINK + (v6 ? IPV6_HOPS : IPV4_TTL);
	__u8 word[2] = {};
	__u16 before, after;

	if (bpf_skb_load_bytes(ctx, at, word, sizeof(word)))
		return;
	__builtin_memcpy(&before, word, sizeof(before));
	word[0]--;
	__builtin_memcpy(&after, word, sizeof(after));
	if (!v6)
		bpf_l3_csum_replace(ctx, LINK + IPV4_CHECKSUM, before, after, sizeof(after));
	bpf_skb_store_bytes(ctx, at, word, 1, 0);
}

#endif
