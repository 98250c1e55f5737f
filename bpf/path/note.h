/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What ingress tells the egress programs of the devices by which a packet leaves: the skb keeps its
 * tc_index on the way, but where a program behind ours returns TC_ACT_OK or a bridge's own ingress
 * takes it away. The lower bits are not ours: Cilium's programs have flags there, by which they leave
 * out proxies and firewalls (TC_INDEX_F_*).
 *
 *   0                  nothing
 *   1 to NOTES         the packet has opened a flow in conntrack (engine/conntrack/opening.h)
 *   NOTE_TRANSLATED    ingress has translated it for good (path/translated.h)
 */
#ifndef EBPFLB_PATH_NOTE_H
#define EBPFLB_PATH_NOTE_H

#include "compat.h"

#define NOTES 512
#define NOTE_TRANSLATED 940

#define NOTE_SHIFT 6
#define OTHERS_FLAGS ((1 << NOTE_SHIFT) - 1)

static __always_inline __u32 note_read(const struct __sk_buff *ctx)
{
	return ctx->tc_index >> NOTE_SHIFT;
}

static __always_inline void note_write(struct __sk_buff *ctx, __u32 note)
{
	ctx->tc_index = note << NOTE_SHIFT | (ctx->tc_index & OTHERS_FLAGS);
}

#endif
