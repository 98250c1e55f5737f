/* SPDX-License-Identifier: GPL-2.0 */
/* Headers as they are in a packet (RFC 791, 8200, 9293, 9260, 792, 4443); always copied. */
#ifndef EBPFLB_NET_HEADER_H
#define EBPFLB_NET_HEADER_H

#include "compat.h"
#include "layout.h"

/* Protocol numbers (IANA). A service of TCP serves MPTCP too. */

#define ICMP 1
#define TCP 6
#define UDP 17
#define ICMPV6 58
#define SCTP 132
#define MPTCP 262

/* IPv6 extension headers (RFC 8200 4); an authentication header (51) forbids changes. */
#define HOP_BY_HOP 0
#define ROUTING 43
#define FRAGMENT 44
#define OPTIONS 60

#define ETHERTYPE_IPV4 0x0800
#define ETHERTYPE_IPV6 0x86dd

/* The offset of the IP header: tunnels carry bare IP packets. */
#ifdef NO_LINK_HEADER
#define LINK 0
#else
#define LINK 14
#endif

struct ipv4 {
	__u8 version_length;
	__u8 tos;
	__be16 total;
	__be16 id;
	__be16 fragment;	/* flags, and the offset in units of 8 bytes */
	__u8 ttl;
	__u8 protocol;
	__u16 checksum;
	__be32 source;
	__be32 destination;
};
SIZE(struct ipv4, 20);

#define IPV4_FRAGMENT 6
#define IPV4_TTL 8
#define IPV4_CHECKSUM 10
#define IPV4_ADDRESSES 12
#define IPV4_MORE BE16(0x2000)
#define IPV4_OFFSET BE16(0x1fff)
#define IPV4_DONT BE16(0x4000)

struct ipv6 {
	__be32 version_class_label;
	__be16 payload;
	__u8 next;
	__u8 hops;
	struct address source;
	struct address destination;
};
SIZE(struct ipv6, 40);

#define IPV6_HOPS 7
#define IPV6_ADDRESSES 8

struct ipv6_extension {
	__u8 next;
	__u8 length;		/* beyond the first 8 bytes; in units of 8 */
	__be16 fragment;	/* fragment header: the offset in units of 8 bytes, and "more" */
	__be32 id;
};
SIZE(struct ipv6_extension, 8);

#define IPV6_MORE BE16(1)
#define IPV6_OFFSET BE16(0xfff8)

/* The beginning of a TCP header; UDP and SCTP begin with the ports as well. */
struct transport {
	__be16 source_port;
	__be16 destination_port;
	__be32 sequence;	/* UDP: length and checksum; SCTP: verification tag */
	__be32 acknowledgment;
	__u8 offset;		/* high half: header length in units of 4 bytes; SCTP: first chunk */
	__u8 flags;		/* SCTP: of the chunk */
	__be16 window;
};
SIZE(struct transport, 16);

/* The whole UDP header (RFC 768). */
struct udp {
	__be16 source_port;
	__be16 destination_port;
	__be32 length_checksum;
};
SIZE(struct udp, 8);

#define TCP_CHECKSUM 16
#define UDP_CHECKSUM 6
#define SCTP_CHECKSUM 8
#define ICMP_CHECKSUM 2

#define TCP_FIN 1
#define TCP_SYN 2
#define TCP_RST 4
#define TCP_ACK 16

/* Whether a segment with these flags opens a connection; a SYN/ACK answers one. */
static __always_inline bool tcp_opens(__u8 flags)
{
	return (flags & (TCP_SYN | TCP_ACK | TCP_RST)) == TCP_SYN;
}

/* Chunks (RFC 9260 3.2) */
#define SCTP_INIT 1
#define SCTP_INIT_ACK 2
#define SCTP_ABORT 6
#define SCTP_SHUTDOWN 7
#define SCTP_COMPLETE 14
#define SCTP_REFLECTED 1	/* flag T: the packet has the tag of its sender, not of its receiver */

struct icmp {
	__u8 type;
	__u8 code;
	__u16 checksum;
	__be32 rest;
};
SIZE(struct icmp, 8);

#endif
