/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Reads a packet: addresses, protocol and, but for ICMP, ports. A later fragment has none; one of a
 * datagram that was not translated is left alone.
 */
#ifndef EBPFLB_PATH_PARSE_H
#define EBPFLB_PATH_PARSE_H

#include "net/transport.h"
#include "path/fragment.h"
#include "path/outcome.h"

static __always_inline enum reading packet_parse(struct __sk_buff *ctx, struct packet *packet)
{
	enum reading reading = packet_read_ip(ctx, packet);

	if (reading == READ && packet_is_icmp(packet))
		return READ_ICMP;
	if (reading == READ)
		reading = packet_read_transport(ctx, packet);
	if (reading == READ && packet->piece == LATER && !fragment_complete(packet))
		return FOREIGN;
	return reading;
}

static __always_inline struct outcome not_read(enum reading reading)
{
	return unchanged(reading == MALFORMED ? VERDICT_MALFORMED : VERDICT_PASSED);
}

#endif
