/* SPDX-License-Identifier: GPL-2.0 */
/* Session affinity; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_AFFINITY_H
#define EBPFLB_LAYOUT_AFFINITY_H

/* A client of a service: a network namespace's cookie at sockets, an address in packets. */
struct affinity_key {
	__u64 netns;
	struct address address;
	__u32 service;
	__u32 pad;
};
SIZE(struct affinity_key, 32);

struct affinity {
	__u64 last_used;	/* nanoseconds of CLOCK_MONOTONIC */
	__u32 backend;
	__u32 pad;
};
SIZE(struct affinity, 16);

#endif
