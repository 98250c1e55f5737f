/* SPDX-License-Identifier: GPL-2.0 */
/* Turns a TCP segment into the reset that refuses it (RFC 9293 3.10.7.1). */
#ifndef EBPFLB_NET_RESET_H
#define EBPFLB_NET_RESET_H

#include "net/response.h"

struct reset {
	struct transport head;
	__u16 checksum;
	__be16 urgent;
};
SIZE(struct reset, 20);

/* Returns the sequence number after the segment: its payload counts, and so do SYN and FIN. */
static __always_inline __be32 segment_next(const struct packet *packet,
					   const struct transport *segment)
{
	__u32 payload = packet->end - packet->transport - (segment->offset >> 4) * 4;
	__u32 length = payload + !!(segment->flags & TCP_SYN) + (segment->flags & TCP_FIN);

	return BE32(__builtin_bswap32(segment->sequence) + length);
}

/*
 * The reset of a segment with an acknowledgment has the number that the sender expects next; the
 * reset of any other segment acknowledges it whole.
 */
static __always_inline void reset_number(const struct packet *packet,
					 const struct transport *segment, struct transport *head)
{
	if (segment->flags & TCP_ACK) {
		head->flags = TCP_RST;
		head->sequence = segment->acknowledgment;
	} else {
		head->flags = TCP_RST | TCP_ACK;
		head->acknowledgment = segment_next(packet, segment);
	}
}

static __always_inline bool respond_reset(struct __sk_buff *ctx, const struct packet *packet,
					 const struct tuple *to)
{
	EMPTY(struct reset, reset);
	EMPTY(struct transport, segment);
	__s64 pseudo = pseudo_sum(to, TCP, sizeof(*reset));
	__u32 at = packet->transport, difference;

	if (bpf_skb_load_bytes(ctx, at, segment, sizeof(*segment)))
		return false;
	reset->head.source_port = to->source_port;
	reset->head.destination_port = to->destination_port;
	reset->head.offset = sizeof(*reset) / 4 << 4;
	reset_number(packet, segment, &reset->head);
	/* From the sum of the pseudo header alone to the complement of the whole sum. */
	difference = folded(sum_of(reset, sizeof(*reset), pseudo)) + folded(pseudo);
	reset->checksum = folded(pseudo);
	if (bpf_skb_change_tail(ctx, at + sizeof(*reset), 0))
		return false;
	write_ip(ctx, packet, to, TCP, sizeof(*reset));
	return !bpf_skb_store_bytes(ctx, at, reset, sizeof(*reset), 0) &&
	       !bpf_l4_csum_replace(ctx, at + TCP_CHECKSUM, 0, difference, 0);
}

#endif
