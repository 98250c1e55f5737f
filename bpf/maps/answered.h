/* SPDX-License-Identifier: GPL-2.0 */
/* The load balancer addresses that this node answers for (hooks/answer.c); only with --l2-pool. */
#ifndef EBPFLB_MAPS_ANSWERED_H
#define EBPFLB_MAPS_ANSWERED_H

/*
 * The device at which an address is answered for, and the device's own MAC address. until: the time of
 * bpf_ktime_get_ns() from which it is not; 0: no such time.
 */
struct answer {
	__u32 ifindex;
	__u8 mac[6];
	__u16 pad[3];
	__u64 until;
};
SIZE(struct answer, 24);

DEFINE_MAP(answered, HASH, struct address, struct answer, 2048, RDONLY_PROG | NO_PREALLOC)

#endif
