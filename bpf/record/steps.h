/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The steps of a decision, which the recording variant of the programs (-DRECORD) notes for `ebpflb
 * explain`, and their map. The map is not part of layout.h and maps.h: it is created for each
 * question, and never pinned. Python reads this file.
 */
#ifndef EBPFLB_RECORD_STEPS_H
#define EBPFLB_RECORD_STEPS_H

#include "compat.h"
#include "layout.h"

/* The meaning of a step's value and address; without a comment they mean nothing. */
enum step_kind {
	STEP_FOREIGN = 1,	/* a socket of a protocol that its hooks leave alone */
	STEP_LEFT_TO_PACKETS,	/* a pod's socket, by --socket-translation */
	STEP_SERVICE,		/* id, and the address of the frontend in the map */
	STEP_ADDRESS_USE,	/* no frontend: enum address_use */
	STEP_CLIENT_UNKNOWN,	/* a pod's socket, to a service with source ranges */
	STEP_ADMISSION,		/* whether source ranges admit it, and which clients */
	STEP_ASSIGNED,		/* backend id, of a datagram socket that has one */
	STEP_POLICY,		/* enum step_policy */
	STEP_AFFINITY_ASKED,	/* 1: in new_affinity */
	STEP_AFFINITY_EXPIRED,	/* backend id, here and below */
	STEP_AFFINITY_GONE,	/* the backend is no longer in the list */
	STEP_AFFINITY_USED,
	STEP_AFFINITY_REMEMBERED,	/* 1: in new_affinity */
	STEP_SLOT,		/* the slot that was picked */
	STEP_NODE_LOCAL,	/* the slot of the node-local listener */
	STEP_UNTRACKED,		/* rules in raw exempt the packet */
	STEP_PASSTHROUGH,	/* no endpoint: the packet goes on to the router */
	STEP_UNKNOWN_PORT,	/* of a load balancer's address; 1: the route leads back to the router */
	STEP_FLOW,		/* enum flow_kind of the entry that the packet has, and its address */
	STEP_FLOW_REPLACED,
	STEP_ATTACHING,
	STEP_DIRECT,
	STEP_SNAT,		/* enum masquerade_reason */
	STEP_CHOSEN,		/* enum chosen with the backend's id, and its address */
	STEP_OPENED,		/* enum opened */
	STEP_SOURCE,		/* enum step_source, and the address */
	STEP_REPLY_DEVICE,	/* ifindex by which the reply leaves, past the routes */
	STEP_ERRNO,		/* of the system call */
	STEP_ANSWER,		/* enum answer << 16 | port, and the address: of the socket's call */
	STEP_VERDICT,		/* enum verdict */
};

enum step_policy {
	STEP_LOCAL_ONLY = 1,	/* else of all nodes */
	STEP_LOCAL_CLIENT = 2,
};

/* The origin of a masqueraded flow's source address. */
enum step_source {
	STEP_BY_ROUTE = 1,	/* the kernel's route */
	STEP_BY_DEVICES,	/* the map devices */
};

struct step {
	__u32 what;		/* enum step_kind */
	__u32 value;
	struct address address;
};
SIZE(struct step, 24);

enum step_limit {
	STEPS = 40,
};

/*
 * The steps of one run. Where there is no socket (explain.c), the asking process writes the first
 * part: the socket's request.
 */
struct steps {
	__u64 socket;		/* cookies */
	__u64 netns;
	__u64 initial_netns;
	__u32 type;		/* of the socket: SOCK_STREAM, ... */
	struct frontend frontend;
	__u32 count;
	__u32 pad;
	struct step step[40];
};
SIZE(struct steps, 1016);

/* One element. */
DEFINE_MAP(steps, PERCPU_ARRAY, __u32, struct steps, 1, NONE)

#endif
