/* SPDX-License-Identifier: GPL-2.0 */
/* Turns an echo request into its reply (RFC 792, RFC 4443 4.2): its data stays as it is. */
#ifndef EBPFLB_NET_ECHO_H
#define EBPFLB_NET_ECHO_H

#include "net/icmp_error.h"
#include "net/response.h"

#define ECHO_REPLY 0
#define ECHO_REPLY_V6 129

/* The sum of ICMPv6's pseudo header stays the same, because the addresses only change their places. */
static __always_inline bool respond_echo(struct __sk_buff *ctx, const struct packet *packet,
					 const struct tuple *to)
{
	const __be16 asked = BE16((packet->v6 ? ECHO_V6 : ECHO) << 8);
	EMPTY(__be16, replied);

	*replied = BE16((packet->v6 ? ECHO_REPLY_V6 : ECHO_REPLY) << 8);
	write_ip(ctx, packet, to, packet->tuple.protocol, packet->end - packet->transport);
	return !bpf_skb_store_bytes(ctx, packet->transport, replied, 1, BPF_F_RECOMPUTE_CSUM) &&
	       !bpf_l4_csum_replace(ctx, packet->transport + ICMP_CHECKSUM, asked, *replied, 2);
}

#endif
