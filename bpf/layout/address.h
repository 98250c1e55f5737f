/* SPDX-License-Identifier: GPL-2.0 */
/* Addresses and frontends; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_ADDRESS_H
#define EBPFLB_LAYOUT_ADDRESS_H

/* An address of either family; IPv4 as v4-mapped IPv6 (RFC 4291 2.5.5.2). */
struct address {
	__be32 word[4];
};
SIZE(struct address, 16);

/* Where a service is reached. The address of a NodePort is its family's unspecified address. */
struct frontend {
	struct address address;
	__be16 port;
	__u8 protocol;		/* IPPROTO_TCP, _UDP or _SCTP */
	__u8 pad;
};
SIZE(struct frontend, 20);

#endif
