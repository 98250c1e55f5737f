/* SPDX-License-Identifier: GPL-2.0 */
/* By how much the windows of a TCP connection are scaled: an option of its SYNs (RFC 7323 2). */
#ifndef EBPFLB_NET_SCALE_H
#define EBPFLB_NET_SCALE_H

#include "net/packet.h"

#define SCALE_MOST 14	/* RFC 7323 2.3 */
#define TCP_OPTIONS 10	/* more options than this are not walked */
#define OPTION_END 0
#define OPTION_NOTHING 1
#define OPTION_SCALE 3

struct tcp_option {
	__u8 kind;
	__u8 length;
	__u8 scale;
	__u8 pad;
};

/*
 * The window scale that a SYN offers; the largest if it has more options than are walked. It is in
 * use only if both SYNs offer one; here windows are then taken for larger than they are.
 */
static __always_inline __u8 window_scale(struct __sk_buff *ctx, const struct packet *packet)
{
	__u32 at = packet->transport + 20, end = packet->transport + packet->header;
	EMPTY(struct tcp_option, option);

	UNROLL
	for (int i = 0; i < TCP_OPTIONS; i++) {
		if (at + 3 > end || bpf_skb_load_bytes(ctx, at, option, 3) ||
		    option->kind == OPTION_END)
			return 0;
		if (option->kind == OPTION_SCALE)
			return option->scale < SCALE_MOST ? option->scale : SCALE_MOST;
		at += option->kind == OPTION_NOTHING ? 1 : option->length;
	}
	return SCALE_MOST;
}

#endif
