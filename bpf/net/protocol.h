/* SPDX-License-Identifier: GPL-2.0 */
/* The transport protocols that sockets speak; to whoever is served, MPTCP is TCP. */
#ifndef EBPFLB_NET_PROTOCOL_H
#define EBPFLB_NET_PROTOCOL_H

#define TCP 6
#define UDP 17
#define MPTCP 262

#endif
