/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The tuple of a plain packet: a datagram of UDP, or a TCP segment that opens no connection, whose headers
 * lie in one piece, without IP options, extension headers or fragments. False for every other packet, which
 * net/packet.h and net/transport.h may still read.
 */
#ifndef EBPFLB_NET_GLANCE_H
#define EBPFLB_NET_GLANCE_H

#include "net/header.h"
#include "net/packet.h"
#include "net/protocol.h"

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
