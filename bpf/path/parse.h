/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Reads a packet: addresses, protocol and, except for ICMP, ports. A later fragment has no ports,
 * and is left alone if its datagram was not translated. At ingress, packets to another host are
 * left alone too, except those that a bridge passes on: they may be of direct connections.
 */
#ifndef EBPFLB_PATH_PARSE_H
#define EBPFLB_PATH_PARSE_H

#include "core/outcome.h"
#include "engine/flows/gate.h"
#include "net/packet.h"
#include "path/fragment.h"

#define TO_OTHER_HOST 3	/* PACKET_OTHERHOST: the frame has a MAC address that is not the device's */

#ifndef NO_LINK_HEADER

/* Whether the frame's destination is the MAC address of a device of this node. */
static __always_inline bool frame_is_to_own_device(struct __sk_buff *ctx)
{
	EMPTY(struct link_address, destination);

	return !bpf_skb_load_bytes(ctx, 0, destination, sizeof(destination->byte)) &&
	       LOOKUP(__u32, link_addresses, destination);
}

#endif

/*
 * Whether a received frame is for another host. A device in promiscuous mode receives such frames,
 * and the stack drops them. A bridge passes them on. At its ports, a frame with another MAC address
 * than the port's may also be for the bridge, or for another of its ports. Other switches (Open
 * vSwitch) may have MAC addresses that belong to no device, so a frame at their ports may be for
 * them. What a bridge passes on is read only where it may be of a direct connection
 * (engine/flows/direct.h).
 */
static __always_inline bool frame_is_for_others(struct __sk_buff *ctx, struct packet *packet)
{
#ifdef NO_LINK_HEADER
	return false;
#else
	struct device *device;

	if (ctx->pkt_type != TO_OTHER_HOST)
		return false;
	device = LOOKUP_NUMBER(struct device, devices, ctx->ifindex);
	if (device && device->flags & DEVICE_BRIDGED) {
		packet->is_bridged = !frame_is_to_own_device(ctx);
		return packet->is_bridged && !flows_may_exist();
	}
	return device && device->flags & DEVICE_HOST_ONLY;
#endif
}

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

static __always_inline enum reading ingress_parse(struct __sk_buff *ctx, struct packet *packet)
{
	enum reading reading = frame_is_for_others(ctx, packet) ? FOREIGN
								: packet_parse(ctx, packet);

	return packet->is_bridged && reading != READ ? FOREIGN : reading;
}

static __always_inline struct outcome not_read(enum reading reading)
{
	return unchanged(reading == MALFORMED ? VERDICT_MALFORMED : VERDICT_PASSED);
}

#endif
