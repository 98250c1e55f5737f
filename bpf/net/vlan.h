/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Tags of IEEE 802.1Q. One with id 0 only carries a priority (802.1p): the frame is in no VLAN, and
 * the kernel takes the tag off when it receives the frame (__netif_receive_skb_core). One with
 * another id makes the frame its VLAN's.
 *
 * The kernel has moved a frame's outer tag into the skb before our hooks run. A further tag is still
 * in the frame, and makes the skb's protocol that of a tag. Taking it off moves the next one into the skb.
 */
#ifndef EBPFLB_NET_VLAN_H
#define EBPFLB_NET_VLAN_H

#include "net/header.h"

#define ETHERTYPE_VLAN 0x8100
#define ETHERTYPE_SERVICE_VLAN 0x88a8	/* 802.1ad */
#define VLAN_ID 0x0fff			/* of the tag's 16 bits; the others are priority and DEI */

/* Whether the tag in the skb makes the frame a VLAN's. */
static __always_inline bool vlan_is_foreign(struct __sk_buff *ctx)
{
	return ctx->vlan_present && ctx->vlan_tci & VLAN_ID;
}

/*
 * Takes a priority tag out of the frame, as the kernel would next, so that the headers lie where
 * those of an untagged frame do. Not at egress, where no frame is received.
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

/* What the node sends itself has no priority tag, so a reply into which a frame is turned has none. */
static __always_inline void vlan_forget_priority(struct __sk_buff *ctx)
{
	if (ctx->vlan_present)
		bpf_skb_vlan_pop(ctx);
}

#endif
