/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Marks packets that ingress has translated completely. The egress programs of the devices by which
 * they leave recognize the mark and look nothing up. If a packet loses its mark on the way (a
 * bridge's own ingress removes it), egress looks the packet up and finds nothing to do.
 */
#ifndef EBPFLB_CORE_NOTE_H
#define EBPFLB_CORE_NOTE_H

#include "maps.h"
#include "net/hops.h"

/*
 * The skb keeps its tc_index on its way through the stack, unless a later program returns
 * TC_ACT_OK. The lower bits are Cilium's: flags by which its programs skip proxies and firewalls
 * (TC_INDEX_F_*).
 */
#define NOTE_TRANSLATED 940
#define NOTE_SHIFT 6
#define OTHERS_FLAGS ((1 << NOTE_SHIFT) - 1)

static __always_inline void note_write(struct __sk_buff *ctx, __u32 note)
{
	ctx->tc_index = note << NOTE_SHIFT | (ctx->tc_index & OTHERS_FLAGS);
}

/* At egress: whether ingress has translated the packet for good. */
static __always_inline bool is_translated(const struct __sk_buff *ctx)
{
	return ctx->tc_index >> NOTE_SHIFT == NOTE_TRANSLATED;
}

/* At ingress: removes a mark that a program of another node on this kernel has set. */
static __always_inline void translated_begin(struct __sk_buff *ctx)
{
	if (is_translated(ctx))
		note_write(ctx, 0);
}

/* At ingress: marks a packet of a known flow whose request is not masqueraded, so needs no more. */
static __always_inline void translated_note(struct __sk_buff *ctx, const struct flow *known)
{
	if (known->kind == FLOW_DNAT && !(known->flags & FLOW_MASQUERADE))
		note_write(ctx, NOTE_TRANSLATED);
}

/* Redirects the packet to its next hop by a device, as the kernel finds it there. */
static __always_inline int translated_leave(struct __sk_buff *ctx, const struct packet *packet,
					    __u32 device)
{
	hops_decrement(ctx, packet->v6);
	note_write(ctx, NOTE_TRANSLATED);
	return redirect_neigh(device, NULL, 0, 0);
}

#endif
