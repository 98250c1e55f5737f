/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Rejects a packet like a port without a listener (kube-proxy.md 6.1), or answers a ping, each at most a
 * thousand times a second on each CPU. Further packets are dropped, so that the replies cannot become a
 * flood. Clients share the budgets of pings by a hash of their addresses: a flood leaves nearly all
 * others their answers. An answer is no larger than its ping.
 */
#ifndef EBPFLB_PATH_REJECT_PACKET_H
#define EBPFLB_PATH_REJECT_PACKET_H

#include "core/tuple.h"
#include "net/icmp_error.h"
#include "net/response.h"
#include "path/attempt.h"

/* Turns an echo request into its reply (RFC 792, RFC 4443 4.2): its data stays as it is. */

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

/* Turns a TCP segment into the reset that refuses it (RFC 9293 3.10.7.1). */

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

/*
 * Turns a packet into a "port unreachable" that quotes its head (RFC 792, RFC 4443 3.1), or, with
 * an MTU, into a "packet too big" (RFC 1191 4, RFC 4443 3.2).
 */

#define UNREACHABLE 3
#define PORT 3
#define FRAGMENTATION_NEEDED 4
#define UNREACHABLE_V6 1
#define PORT_V6 4
#define TOO_BIG_V6 2

/* The IP header and the first 8 bytes of the transport header, which hold the ports. */
struct unreachable_v4 {
	struct icmp head;
	__u8 quote[28];
};

struct unreachable_v6 {
	struct icmp head;
	__u8 quote[48];
};

static __always_inline bool respond_unreachable_v4(struct __sk_buff *ctx,
						  const struct packet *packet,
						  const struct tuple *to, __u16 mtu)
{
	EMPTY(struct unreachable_v4, icmp);

	icmp->head.type = UNREACHABLE;
	icmp->head.code = mtu ? FRAGMENTATION_NEEDED : PORT;
	icmp->head.rest = BE32(mtu);

	if (bpf_skb_load_bytes(ctx, LINK, icmp->quote, sizeof(icmp->quote)) ||
	    bpf_skb_change_tail(ctx, LINK + sizeof(struct ipv4) + sizeof(*icmp), 0))
		return false;
	icmp->head.checksum = fold(sum_of(icmp, sizeof(*icmp), 0));
	write_ip(ctx, packet, to, ICMP, sizeof(*icmp));
	return !bpf_skb_store_bytes(ctx, LINK + sizeof(struct ipv4), icmp, sizeof(*icmp), 0);
}

/*
 * The datagram's checksum field becomes an unused field, which must be 0 when the message is summed
 * up. If a device still has to compute the datagram's checksum, it makes the field 0 again
 * (0xffff).
 */
static __always_inline bool unreachable_checksum_v6(struct __sk_buff *ctx, __s64 pseudo)
{
	const __u32 at = LINK + sizeof(struct ipv6) + UDP_CHECKSUM;
	EMPTY(__u16, sum);

	*sum = folded(pseudo);
	return !bpf_skb_store_bytes(ctx, at, sum, sizeof(*sum), 0) &&
	       !bpf_l4_csum_replace(ctx, at, 0, *sum, 0);
}

static __always_inline bool respond_unreachable_v6(struct __sk_buff *ctx,
						  const struct packet *packet,
						  const struct tuple *to, __u16 mtu)
{
	EMPTY(struct unreachable_v6, icmp);
	__s64 pseudo = pseudo_sum(to, ICMPV6, sizeof(*icmp));

	icmp->head.type = mtu ? TOO_BIG_V6 : UNREACHABLE_V6;
	icmp->head.code = mtu ? 0 : PORT_V6;
	icmp->head.rest = BE32(mtu);

	if (bpf_skb_load_bytes(ctx, LINK, icmp->quote, sizeof(icmp->quote)) ||
	    bpf_skb_change_tail(ctx, LINK + sizeof(struct ipv6) + sizeof(*icmp), 0))
		return false;
	icmp->head.checksum = fold(sum_of(icmp, sizeof(*icmp), pseudo));
	write_ip(ctx, packet, to, ICMPV6, sizeof(*icmp));
	return !bpf_skb_store_bytes(ctx, LINK + sizeof(struct ipv6), icmp, sizeof(*icmp), 0) &&
	       (mtu || unreachable_checksum_v6(ctx, pseudo));
}

#define REJECTS 1000
#define PING_BUDGETS (ENTRIES_reject_budgets - 1)
#define REFILL 1000000000ULL	/* ns */

/* The first budget is that of refusals. */
static __always_inline __u32 reply_budget(const struct packet *packet, bool is_ping)
{
	return is_ping ? 1 + packet_client(&packet->tuple.source, true) % PING_BUDGETS : 0;
}

static __always_inline bool reply_within_budget(const __u32 which)
{
	struct reject_budget *budget = LOOKUP_NUMBER(struct reject_budget, reject_budgets, which);
	__u64 now = clock_coarse();

	if (!budget)
		return false;
	if (now >= budget->refilled + REFILL) {
		budget->refilled = now;
		budget->left = REJECTS;
	}
	if (!budget->left)
		return false;
	budget->left -= 1;
	return true;
}

/*
 * Turns a packet into its reply: one that refuses it, or tells the MTU that it exceeds, or answers the ping.
 * Returns false over the limit, and for a packet with options or extension headers.
 */
static __always_inline bool reply_packet(struct __sk_buff *ctx, const struct packet *packet,
					 bool is_ping, __u16 mtu)
{
	EMPTY(struct tuple, to);

	tuple_write_reverse(to, &packet->tuple, 0);
	if (packet->options || packet->piece == LATER || (is_ping && packet->piece != WHOLE) ||
	    !reply_within_budget(reply_budget(packet, is_ping)))
		return false;
	vlan_forget_priority(ctx);
	if (is_ping)
		return respond_echo(ctx, packet, to);
	if (packet->tuple.protocol == TCP && !mtu)
		return respond_reset(ctx, packet, to);
	return packet->v6 ? respond_unreachable_v6(ctx, packet, to, mtu)
			  : respond_unreachable_v4(ctx, packet, to, mtu);
}

#endif
