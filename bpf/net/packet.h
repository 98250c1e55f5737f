/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Reads the headers of a packet: a VLAN's tag, IP with IPv6's extension headers, and the transport
 * header. They are copied out of the skb, so its layout does not matter. Every length is checked
 * before it is used.
 */
#ifndef EBPFLB_NET_PACKET_H
#define EBPFLB_NET_PACKET_H

#include "net/address.h"
#include "net/header.h"

/*
 * Tags of IEEE 802.1Q. A tag with id 0 only carries a priority (802.1p): the frame is in no VLAN,
 * and the kernel removes the tag when it receives the frame (__netif_receive_skb_core). A tag with
 * another id puts the frame into that VLAN.
 *
 * The kernel moves a frame's outer tag into the skb before it runs these hooks. An inner tag stays in
 * the frame, and the skb's protocol is the inner tag's. When the outer tag is removed, the kernel
 * moves the inner tag into the skb.
 */

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

/* Whether the header ends within the packet. */
static __always_inline bool transport_is_valid(const struct packet *packet,
					       const struct transport *transport)
{
	__u32 header = (transport->offset >> 4) * 4;

	return packet->tuple.protocol != TCP ||
	       (header >= 20 && packet->transport + header <= packet->end);
}

static __always_inline void packet_note_tcp(struct packet *packet,
					    const struct transport *transport)
{
	__u8 flags = transport->flags;

	packet->control = flags;
	packet->sequence = host32(transport->sequence);
	packet->acknowledgment = host32(transport->acknowledgment);
	packet->header = (transport->offset >> 4) * 4;
	packet->bytes = packet->end - packet->transport - packet->header +
			!!(flags & TCP_SYN) + !!(flags & TCP_FIN);
	packet->opens = tcp_opens(flags);
	packet->ends = (flags & TCP_FIN ? FLOW_FIN : 0) | (flags & TCP_RST ? FLOW_RST : 0);
}

/* Notes the first chunk: INIT, INIT ACK and SHUTDOWN COMPLETE are alone in their packets. */
static __always_inline void packet_note_sctp(struct __sk_buff *ctx, struct packet *packet,
					     const struct transport *transport)
{
	__u8 chunk = transport->offset;
	__be32 initiate_tag;

	packet->reflected = transport->flags & SCTP_REFLECTED;
	packet->tag = host32(transport->sequence);
	if ((chunk == SCTP_INIT || chunk == SCTP_INIT_ACK) &&
	    packet->transport + 20 <= packet->end &&
	    !bpf_skb_load_bytes(ctx, packet->transport + 16, &initiate_tag, sizeof(initiate_tag)))
		packet->initiate_tag = host32(initiate_tag);
	packet->opens = chunk == SCTP_INIT;
	packet->ends = chunk == SCTP_SHUTDOWN ? FLOW_FIN
		       : chunk == SCTP_ABORT || chunk == SCTP_COMPLETE ? FLOW_RST : 0;
}

/* Without IP options or extension headers the header lies at a constant offset. */
#define TRANSPORT_READ(ctx, packet, to) ( \
	(packet)->options ? !bpf_skb_load_bytes(ctx, (packet)->transport, to, sizeof(*(to))) \
	: (packet)->v6 ? HEADER_READ(ctx, LINK + sizeof(struct ipv6), to) \
	: HEADER_READ(ctx, LINK + sizeof(struct ipv4), to))

/* Reads the beginning of the header (UDP's is shorter). Returns false if it is cut short. */
static __always_inline bool transport_read(struct __sk_buff *ctx, const struct packet *packet,
					   struct transport *transport)
{
	struct udp udp;

	if (packet->tuple.protocol != UDP)
		return TRANSPORT_READ(ctx, packet, transport);
	if (!TRANSPORT_READ(ctx, packet, &udp))
		return false;
	transport->source_port = udp.source_port;
	transport->destination_port = udp.destination_port;
	transport->sequence = udp.length_checksum;
	return true;
}

/* Reads the ports, and whether the packet opens or ends a flow. */
static __always_inline enum reading packet_read_transport(struct __sk_buff *ctx,
							  struct packet *packet)
{
	__u8 protocol = packet->tuple.protocol;
	struct transport transport = {};

	if (protocol != TCP && protocol != UDP && protocol != SCTP)
		return FOREIGN;
	if (packet->piece == LATER)
		return READ;
	if (packet->transport + (protocol == UDP ? 8 : 16) > packet->end)
		return MALFORMED;
	if (!transport_read(ctx, packet, &transport))
		return MALFORMED;
	if (!transport_is_valid(packet, &transport))
		return MALFORMED;
	packet->tuple.source_port = transport.source_port;
	packet->tuple.destination_port = transport.destination_port;
	packet->opens = true;
	packet->second = transport.sequence;
	if (protocol == TCP)
		packet_note_tcp(packet, &transport);
	else if (protocol == SCTP)
		packet_note_sctp(ctx, packet, &transport);
	return READ;
}

/*
 * The tuple of a plain packet: a datagram of UDP, or a TCP segment that opens no connection, whose
 * headers lie in one piece, without IP options, extension headers or fragments. False for every
 * other packet, which packet_read_ip and packet_read_transport may still read.
 */

#define PLAIN_V4 0x45	/* version 4, a header of 20 bytes */

/* The ports; `length` is how many bytes follow the IP header, by what it says. */
static __always_inline bool glance_ports(struct __sk_buff *ctx, __u32 at, __u32 length,
					 struct tuple *tuple)
{
	const struct transport *header = (void *)(long)ctx->data + at;
	const void *end = (void *)(long)ctx->data_end;
	__u32 size;

	if ((const void *)header + sizeof(struct udp) > end)
		return false;
	tuple->source_port = header->source_port;
	tuple->destination_port = header->destination_port;
	if (tuple->protocol == UDP)
		return length >= sizeof(struct udp);
	if (tuple->protocol != TCP || (const void *)(header + 1) > end)
		return false;
	size = (header->offset >> 4) * 4;
	return size >= 20 && size <= length && !tcp_opens(header->flags);
}

static __always_inline bool glance_v4(struct __sk_buff *ctx, struct tuple *tuple)
{
	const struct ipv4 *ip = (void *)(long)ctx->data + LINK;
	__u32 total;

	if ((const void *)(ip + 1) > (const void *)(long)ctx->data_end)
		return false;
	total = host16(ip->total);
	if (ip->version_length != PLAIN_V4 || ip->fragment & (IPV4_MORE | IPV4_OFFSET) ||
	    total < sizeof(*ip) || LINK + total > ctx->len)
		return false;
	tuple->source = address_from_v4(ip->source);
	tuple->destination = address_from_v4(ip->destination);
	tuple->protocol = ip->protocol;
	return glance_ports(ctx, LINK + sizeof(*ip), total - sizeof(*ip), tuple);
}

static __always_inline bool glance_v6(struct __sk_buff *ctx, struct tuple *tuple)
{
	const struct ipv6 *ip = (void *)(long)ctx->data + LINK;
	__u32 length;

	if ((const void *)(ip + 1) > (const void *)(long)ctx->data_end)
		return false;
	length = host16(ip->payload);
	if ((ip->version_class_label & BE32(0xf0000000)) != BE32(0x60000000) ||
	    LINK + sizeof(*ip) + length > ctx->len || address_is_v4(&ip->source) ||
	    address_is_v4(&ip->destination))
		return false;
	tuple->source = ip->source;
	tuple->destination = ip->destination;
	tuple->protocol = ip->next;
	return glance_ports(ctx, LINK + sizeof(*ip), length, tuple);
}

static __always_inline bool glance(struct __sk_buff *ctx, struct tuple *tuple)
{
	if (vlan_is_foreign(ctx))
		return false;
	if (ctx->protocol == BE16(ETHERTYPE_IPV4))
		return glance_v4(ctx, tuple);
	return ctx->protocol == BE16(ETHERTYPE_IPV6) && glance_v6(ctx, tuple);
}

#endif
