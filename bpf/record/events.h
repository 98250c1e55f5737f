/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The decisions that the monitoring variant of the programs (-DMONITOR) sends to `ebpflb monitor`,
 * and the maps for them. Like steps.h they are not part of layout.h and maps.h: they exist while a
 * monitor runs, and are never pinned. Python reads this file.
 */
#ifndef EBPFLB_RECORD_EVENTS_H
#define EBPFLB_RECORD_EVENTS_H

#include "compat.h"
#include "layout.h"

/* The place of a decision; the calls are in the order of enum call (path/socket.h). */
enum event_hook {
	EVENT_CONNECT = 1,
	EVENT_SENDMSG,
	EVENT_RECVMSG,
	EVENT_GETPEERNAME,
	EVENT_BIND,
	EVENT_INGRESS,
	EVENT_EGRESS,
};

/* One decision. For a call the tuple has no source. */
struct event {
	__u64 time;		/* when the hook began: nanoseconds of CLOCK_MONOTONIC */
	__u64 netns;		/* cookie, of a call; 0 of a packet */
	__u32 took;		/* nanoseconds */
	__u32 process;		/* of a call, from Linux 6.1 on */
	__u32 ifindex;		/* of a packet */
	__u32 service;		/* ids; 0: none, or it was not looked up */
	__u32 backend;
	__be16 port;		/* of the address below */
	__u8 verdict;		/* enum verdict */
	__u8 hook;		/* enum event_hook */
	__u8 kind;		/* enum flow_kind of the packet's entry; 0: none, or a new flow */
	__u8 pad[3];
	struct tuple tuple;	/* of the packet as it came */
	struct address address;	/* of the backend; of a known flow as in its entry (struct flow) */
	char comm[16];		/* the process's name */
	__u32 pad_end;
};
SIZE(struct event, 120);

/* The monitor's question: written before the programs are attached. */
struct monitor {
	__u32 verdicts;		/* a bit for each */
};
SIZE(struct monitor, 4);

/* A ring buffer of this many bytes (5.8). If it is full, events are lost, and counted. */
DEFINE_MAP(events, RINGBUF, __u32, struct event, 4194304, NONE)

/* One element each. */
DEFINE_MAP(events_lost, PERCPU_ARRAY, __u32, __u64, 1, NONE)
DEFINE_MAP(monitor, ARRAY, __u32, struct monitor, 1, RDONLY_PROG)

#endif
