/* SPDX-License-Identifier: GPL-2.0 */
/* Reads the transport header: the ports, and whether the packet opens or ends a flow. */
#ifndef EBPFLB_NET_TRANSPORT_H
#define EBPFLB_NET_TRANSPORT_H

#include "net/packet.h"

/* Whether the header ends within the packet. */
static __always_inline bool transport_is_sound(const struct packet *packet,
					       const struct transport *transport)
{
	__u32 header = (transport->offset >> 4) * 4;

	return packet->tuple.protocol != TCP ||
	       (header >= 20 && packet->transport + header <= packet->end);
}

static __always_inline void packet_note_tcp(struct packet *packet, __u8 flags)
{
	packet->opens = (flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN;
	packet->ends = (flags & TCP_FIN ? FLOW_FIN : 0) | (flags & TCP_RST ? FLOW_RST : 0);
}

static __always_inline void packet_note_sctp(struct packet *packet, __u8 chunk)
{
	packet->opens = chunk == SCTP_INIT;
	packet->ends = chunk == SCTP_SHUTDOWN ? FLOW_FIN
		       : chunk == SCTP_ABORT || chunk == SCTP_COMPLETE ? FLOW_RST : 0;
}

/* Ports, and whether the packet opens or ends a flow. */
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
	if (protocol == UDP ? bpf_skb_load_bytes(ctx, packet->transport, &transport, 8)
			    : bpf_skb_load_bytes(ctx, packet->transport, &transport, 16))
		return MALFORMED;
	if (!transport_is_sound(packet, &transport))
		return MALFORMED;
	packet->tuple.source_port = transport.source_port;
	packet->tuple.destination_port = transport.destination_port;
	packet->opens = true;
	packet->second = transport.sequence;
	if (protocol == TCP)
		packet_note_tcp(packet, transport.flags);
	else if (protocol == SCTP)
		packet_note_sctp(packet, transport.offset);
	return READ;
}

#endif
