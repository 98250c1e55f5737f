/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Reads the IP header of a packet, and IPv6 extension headers. Headers are copied out of the skb,
 * so the layout of the skb does not matter. Every length is checked before it is used.
 */
#ifndef EBPFLB_NET_PACKET_H
#define EBPFLB_NET_PACKET_H

#include "net/address.h"
#include "net/header.h"
#include "net/protocol.h"
#include "net/vlan.h"

#define EXTENSIONS 6	/* more IPv6 extension headers than this are not walked */

/* Whether a packet is whole, or which fragment it is. */
enum piece { WHOLE, FIRST, LATER };

/*
 * FOREIGN: of a kind that is not translated. MALFORMED: cut short, or contradicts itself.
 * READ_ICMP: has no ports.
 */
enum reading { FOREIGN, MALFORMED, READ, READ_ICMP };

static __always_inline bool packet_is_icmp(const struct packet *packet)
{
	return packet->tuple.protocol == ICMP || packet->tuple.protocol == ICMPV6;
}

static __always_inline __u32 host16(__be16 wire)
{
	return BE16(wire);
}

static __always_inline __u32 host32(__be32 wire)
{
	return BE32(wire);
}

/*
 * Copies a header at a constant offset: directly, if the skb has it in one piece, or else by the
 * kernel's function, which also collects it from pieces. Returns false if the header is cut short.
 * WHOLE_WAY keeps only the calls, here and in rewrite.h, so that tests can compare both ways
 * (tests/packet).
 */
#ifndef WHOLE_WAY
#define HEADER_READ(ctx, at, to) ({ \
	const typeof(*(to)) *there_ = (void *)(long)(ctx)->data + (at); \
	bool is_here_ = (void *)(there_ + 1) <= (void *)(long)(ctx)->data_end; \
	if (is_here_) \
		*(to) = *there_; \
	is_here_ || !bpf_skb_load_bytes(ctx, at, to, sizeof(*(to))); \
})
#else
#define HEADER_READ(ctx, at, to) (!bpf_skb_load_bytes(ctx, at, to, sizeof(*(to))))
#endif

static __always_inline enum reading packet_read_v4(struct __sk_buff *ctx, struct packet *packet)
{
	struct ipv4 ip;

	if (!HEADER_READ(ctx, LINK, &ip))
		return MALFORMED;
	__u32 header = (ip.version_length & 15) * 4;
	/* GSO packets of more than 64 KiB carry no length. */
	__u32 total = !ip.total && ctx->gso_segs > 1 ? ctx->len - LINK : host16(ip.total);

	if (ip.version_length >> 4 != 4 || header < sizeof(ip) || total < header ||
	    LINK + total > ctx->len)
		return MALFORMED;
	packet->tuple.source = address_from_v4(ip.source);
	packet->tuple.destination = address_from_v4(ip.destination);
	packet->tuple.protocol = ip.protocol;
	packet->transport = LINK + header;
	packet->end = LINK + total;
	packet->options = header != sizeof(ip);
	packet->id = ip.id;
	packet->piece = ip.fragment & IPV4_OFFSET ? LATER : ip.fragment & IPV4_MORE ? FIRST : WHOLE;
	return READ;
}

/* Skips the extension header at packet->transport; returns FOREIGN if there is none. */
static __always_inline enum reading packet_skip_extension(struct __sk_buff *ctx,
							  struct packet *packet)
{
	struct ipv6_extension extension;
	__u8 kind = packet->tuple.protocol;

	if ((kind != HOP_BY_HOP && kind != ROUTING && kind != FRAGMENT && kind != OPTIONS) ||
	    packet->piece == LATER)
		return FOREIGN;
	if (bpf_skb_load_bytes(ctx, packet->transport, &extension, sizeof(extension)))
		return MALFORMED;
	packet->options = true;
	packet->tuple.protocol = extension.next;
	if (kind == FRAGMENT) {
		packet->id = extension.id;
		packet->piece = extension.fragment & IPV6_OFFSET ? LATER
				: extension.fragment & IPV6_MORE ? FIRST : WHOLE;
		packet->transport += 8;
	} else {
		packet->transport += (extension.length + 1) * 8;
	}
	return READ;
}

static __always_inline enum reading packet_read_v6(struct __sk_buff *ctx, struct packet *packet)
{
	enum reading reading = READ;
	struct ipv6 ip;

	if (!HEADER_READ(ctx, LINK, &ip))
		return MALFORMED;
	__u32 payload = !ip.payload && ctx->gso_segs > 1 ? ctx->len - LINK - sizeof(ip)
							 : host16(ip.payload);

	packet->end = LINK + sizeof(ip) + payload;
	if ((ip.version_class_label & BE32(0xf0000000)) != BE32(0x60000000) ||
	    packet->end > ctx->len)
		return MALFORMED;
	/* v4-mapped addresses do not occur on the wire, and would stand for IPv4 here. */
	if (address_is_v4(&ip.source) || address_is_v4(&ip.destination))
		return FOREIGN;
	packet->tuple.source = ip.source;
	packet->tuple.destination = ip.destination;
	packet->tuple.protocol = ip.next;
	packet->transport = LINK + sizeof(ip);
	packet->v6 = true;
	UNROLL
	for (int i = 0; i < EXTENSIONS && reading == READ; i++)
		reading = packet_skip_extension(ctx, packet);
	return reading == MALFORMED ? MALFORMED : READ;
}

static __always_inline enum reading packet_read_ip(struct __sk_buff *ctx, struct packet *packet)
{
	if (ctx->protocol != BE16(ETHERTYPE_IPV4) && ctx->protocol != BE16(ETHERTYPE_IPV6) &&
	    !vlan_untag(ctx, packet->tuple.hook))
		return FOREIGN;
	if (vlan_is_foreign(ctx))
		return FOREIGN;
	if (ctx->protocol == BE16(ETHERTYPE_IPV4))
		return packet_read_v4(ctx, packet);
	if (ctx->protocol == BE16(ETHERTYPE_IPV6))
		return packet_read_v6(ctx, packet);
	return FOREIGN;
}

#endif
