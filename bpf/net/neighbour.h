/* SPDX-License-Identifier: GPL-2.0 */
/* Questions for the MAC address of an IP address, and their answers (RFC 826, RFC 4861). */
#ifndef EBPFLB_NET_NEIGHBOUR_H
#define EBPFLB_NET_NEIGHBOUR_H

#include "net/address.h"
#include "net/header.h"

#define ETHERTYPE_ARP 0x0806
#define ARP_REQUEST BE16(1)
#define ARP_REPLY BE16(2)

/* ARP for IPv4 over Ethernet. */
struct arp {
	__be16 hardware;	/* 1: Ethernet */
	__be16 protocol;	/* 0x0800: IPv4 */
	__u8 sizes[2];		/* of MAC addresses, and of IP addresses */
	__be16 operation;
	__u8 sender_mac[6];
	__u8 sender[4];
	__u8 target_mac[6];
	__u8 target[4];
};
SIZE(struct arp, 28);

#define ICMPV6 58
#define SOLICITATION 135
#define ADVERTISEMENT 136
#define NEIGHBOUR_HOPS 255	/* a packet that a router has forwarded has fewer */
#define SOLICITED_OVERRIDE BE32(0x60000000)
#define TARGET_MAC 2		/* the option with the target's MAC address */

/* A solicitation has no flags; the option is an advertisement's. */
struct neighbour {
	__u8 type;
	__u8 code;
	__u16 checksum;
	__be32 flags;
	struct address target;
	__u8 option;
	__u8 length;		/* of the option; in units of 8 */
	__u8 mac[6];
};
SIZE(struct neighbour, 32);

#define SOLICITATION_SIZE 24

#define GROUP_BIT 1	/* of a MAC address's first byte: it is no single station's */

#endif
