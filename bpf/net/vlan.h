/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Tags of IEEE 802.1Q. A tag with id 0 only carries a priority (802.1p): the frame is in no VLAN,
 * and the kernel removes the tag when it receives the frame (__netif_receive_skb_core). A tag with
 * another id puts the frame into that VLAN.
 *
 * The kernel moves a frame's outer tag into the skb before it runs these hooks. An inner tag stays in
 * the frame, and the skb's protocol is the inner tag's. When the outer tag is removed, the kernel
 * moves the inner tag into the skb.
 */
#ifndef EBPFLB_NET_VLAN_H
#define EBPFLB_NET_VLAN_H

#include "net/header.h"

#define ETHERTYPE_VLAN 0x8100
#define ETHERTYPE_SERVICE_VLAN 0x88a8	/* 802.1ad */
#define VLAN_ID 0x0fff			/* of the tag's 16 bits; the others are priority and DEI */

/* Whether the tag in the skb puts the frame into a VLAN. */
static __always_inline bool vlan_is_foreign(struct __sk_buff *ctx)
{
	return ctx->vlan_present && ctx->vlan_tci & VLAN_ID;
}

/*
 * Removes a priority tag from the frame, like the kernel would do next, so that the headers have
 * the same offsets as in an untagged frame. At egress it does nothing: no frame is received there.
 */
static __always_inline bool vlan_untag(struct __sk_buff *ctx, __u8 hook)
{
#ifdef NO_LINK_HEADER
	return false;
#else
	__be16 tag;

	if (hook != HOOK_INGRESS || vlan_is_foreign(ctx))
		return false;
	if (ctx->protocol != BE16(ETHERTYPE_VLAN) && ctx->protocol != BE16(ETHERTYPE_SERVICE_VLAN))
		return false;
	if (bpf_skb_load_bytes(ctx, LINK, &tag, sizeof(tag)) || tag & BE16(VLAN_ID))
		return false;
	return !bpf_skb_vlan_pop(ctx);
#endif
}

/* Removes the priority tag of a frame that becomes a reply: the node's own frames have none. */
static __always_inline void vlan_forget_priority(struct __sk_buff *ctx)
{
	if (ctx->vlan_present)
		bpf_skb_vlan_pop(ctx);
}

#endif
