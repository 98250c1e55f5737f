/* SPDX-License-Identifier: GPL-2.0 */
/* Protocol numbers (IANA). A service of TCP serves MPTCP too. */
#ifndef EBPFLB_NET_PROTOCOL_H
#define EBPFLB_NET_PROTOCOL_H

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

#endif
