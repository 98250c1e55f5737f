/* SPDX-License-Identifier: GPL-2.0 */
/* Services and their backends, written by the agent; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_SERVICE_H
#define EBPFLB_LAYOUT_SERVICE_H

/* A run of slots. */
struct range {
	__u32 base;
	__u32 size;
};
SIZE(struct range, 8);

enum service_flag {
	SERVICE_EXTERNAL = 1,	/* NodePort, externalIP or load balancer VIP */
	SERVICE_LOAD_BALANCER = 2,	/* load balancer VIP */
	SERVICE_LOCAL = 4,	/* the traffic policy of this kind of frontend is Local */
	SERVICE_ENDPOINTS = 8,	/* some node has an endpoint that is usable */
	SERVICE_RESTRICTED = 16,	/* only clients in its source_ranges are admitted */
	SERVICE_NODEPORT = 32,	/* the frontend is a NodePort: it has no address */
	/* the scheduler (rules/scheduler.h); none of these: random */
	SERVICE_ROUND_ROBIN = 64,
	SERVICE_BY_TUPLE = 128,	/* the same for all packets of a flow, on every node */
	SERVICE_BY_CLIENT = 256,	/* the same for all that a client sends, on every node */
	SERVICE_LEAST_CONNECTIONS = 512,	/* its open connections are counted (core/connection.h) */
	SERVICE_EVEN = 1024,	/* with SERVICE_BY_TUPLE: no backend of a list has another weight */
	SERVICE_NODE_LOCAL = 2048,	/* its last slot is what sockets get (docs/node-local.md) */
	SERVICE_UNTRACKED = 4096,	/* rules in raw exempt its packets from conntrack, and so from us */
	SERVICE_PASSTHROUGH = 8192,	/* without a backend, packets go on (docs/external-failover.md) */
};

enum service_backends {
	FIRST_BACKENDS = 10,
};

/*
 * The service at a frontend. A frontend with port 0 and protocol ICMP (for IPv6 too) is the address itself:
 * it decides on packets to no port of a service (path/vip.h). The service's slots are one block, which
 * starts at cluster.base and has in this order:
 *
 *   the backends of the cluster list, the last of which may be in the local list too
 *   the other backends of the local list
 *   backends that are in neither list, and still serve the flows that they have
 *   with SERVICE_NODE_LOCAL the node-local listener
 */
struct service {
	__u32 id;
	__u32 flags;		/* enum service_flag */
	__u32 affinity_seconds;	/* 0: no session affinity */
	__u32 slots;		/* size of the block */
	struct range cluster;
	struct range local;
	struct range table;	/* of choices: the cluster list's, behind it as many of the local list */
	__u32 check;		/* names the frontend (core/check.h) */
	/* the ids of the backends in the block's first slots, then 0; a wrong one costs time only */
	__u32 backends[FIRST_BACKENDS];
};
SIZE(struct service, 84);

enum backend_flag {
	BACKEND_CLUSTER = 1,	/* in the service's cluster list */
	BACKEND_LOCAL = 2,	/* in the service's local list */
	BACKEND_HERE = 4,	/* the endpoint is on this node */
	BACKEND_NODE_LOCAL = 8,	/* a listener on this node, for sockets only: in neither list */
};

/* One slot. It names its service and its backend, for readers that are late. */
struct backend {
	struct address address;
	__be16 port;
	__u16 flags;		/* enum backend_flag */
	__u32 id;
	__u16 service;		/* there are 65,536 ids */
	__u16 weight;		/* among the backends of its lists */
	__u32 check;		/* names the slot (core/check.h) */
};
SIZE(struct backend, 32);

/*
 * One place of a table that is drawn from instead of the slots themselves: by Maglev's permutations,
 * or by weights (Walker's alias method). Each place is as likely as the next.
 */
struct choice {
	__u32 slot;		/* where 32 more random bits are less than below */
	__u32 other;		/* where they are not */
	__u32 below;
};
SIZE(struct choice, 12);

/*
 * The next place of each list of a service with SERVICE_ROUND_ROBIN, counted from 1. 0: there was
 * none yet; where the list has become shorter it is the first.
 */
struct rotation {
	__u32 lock;		/* struct bpf_spin_lock */
	__u32 cluster;
	__u32 local;
};
SIZE(struct rotation, 12);

/* For a longest-prefix match: length counts the bits of all that follows it. */
struct source_range {
	__u32 length;
	__u32 service;
	__u32 nodeport;		/* 1: who is admitted to the NodePort; 0: to load balancer VIPs */
	struct address address;
};
SIZE(struct source_range, 28);

struct service_range {
	__u32 length;
	struct address address;
};
SIZE(struct service_range, 20);

/* Names for people, so that maps can be shown while no agent runs. NUL-padded. */
struct service_name {
	char namespace[64];
	char service[64];
	char port[64];
	__u8 protocol;
	__u8 family;		/* 4 or 6 */
	__u8 pad[6];
};
SIZE(struct service_name, 200);

struct backend_name {
	char node[64];
	char target[64];	/* the pod; longer names end in "…" */
	char zone[64];
};
SIZE(struct backend_name, 192);

#endif
