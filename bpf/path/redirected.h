/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Packets that ingress has translated for good, and redirects: the egress program of the device by
 * which they leave recognizes them, with --fast-forward.
 */
#ifndef EBPFLB_PATH_REDIRECTED_H
#define EBPFLB_PATH_REDIRECTED_H

#include "net/hops.h"

#define TRANSLATED 0xeb1b	/* tc_index of a packet that is redirected; nothing else here sets it */

/* Redirects the packet to its next hop; if that is not known, to the one that the kernel finds. */
static __always_inline int forward_leave(struct __sk_buff *ctx, struct scratch *scratch)
{
	hops_decrement(ctx, &scratch->packet);
#ifdef FAST_FORWARD
	ctx->tc_index = TRANSLATED;
	if (scratch->next.family)
		return redirect_neigh(scratch->device, &scratch->next, sizeof(scratch->next), 0);
#endif
	return redirect_neigh(scratch->device, NULL, 0, 0);
}

/* At ingress: what another node of this kernel has noted in the packet is not about this one. */
static __always_inline void forward_begin(struct __sk_buff *ctx, struct scratch *scratch)
{
#ifdef FAST_FORWARD
	scratch->next.family = 0;
	if (ctx->tc_index == TRANSLATED)
		ctx->tc_index = 0;
#endif
}

/* At egress: whether ingress has translated and redirected the packet. */
static __always_inline bool is_fast_forwarded(struct __sk_buff *ctx)
{
#ifdef FAST_FORWARD
	return ctx->tc_index == TRANSLATED;
#else
	return false;
#endif
}

#endif
