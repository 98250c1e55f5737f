/* SPDX-License-Identifier: GPL-2.0 */
/* Reads the transport header: the ports, and whether the packet opens or ends a flow. */
#ifndef EBPFLB_NET_TRANSPORT_H
#define EBPFLB_NET_TRANSPORT_H

#include "net/packet.h"

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

#endif
