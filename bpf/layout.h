/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The wall between the datapath and the agent: every key, value, flag and verdict, once.
 *
 * C includes this file and Python reads it through cffi, so it holds plain declarations only:
 * no macro but SIZE, no expression but a number. Wire fields are __be16 and __be32 in network
 * order; padding is a field and always zero; ids and indexes are ours, in host order.
 */
#ifndef EBPFLB_LAYOUT_H
#define EBPFLB_LAYOUT_H

#define SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), "the size of " #type)

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
	SERVICE_ENDPOINTS = 8,	/* an endpoint is usable somewhere in the cluster */
};

/*
 * What a frontend leads to. It names its frontend first, so that a reader notices when the map's
 * element was given to another while it read. The service's slots are one block that starts at
 * cluster.base: first the backends of the cluster list, overlapping with those of the local
 * list, then those that are in neither list but still serve the flows they have.
 */
struct service {
	struct frontend frontend;
	__u32 id;
	__u32 flags;		/* enum service_flag */
	__u32 affinity_seconds;	/* 0: no session affinity */
	__u32 slots;		/* size of the block */
	struct range cluster;
	struct range local;
};
SIZE(struct service, 52);

enum backend_flag {
	BACKEND_CLUSTER = 1,	/* in the service's cluster list */
	BACKEND_LOCAL = 2,	/* in the service's local list */
};

/* One slot. It names its service and itself, so that a torn or recycled read is noticed. */
struct backend {
	struct address address;
	__be16 port;
	__u16 flags;		/* enum backend_flag */
	__u32 id;
	__u32 service;
	__u32 pad;
};
SIZE(struct backend, 32);

/* Who has session affinity: a network namespace's cookie at sockets, an address in packets. */
struct client {
	__u64 netns;
	struct address address;
	__u32 service;
	__u32 pad;
};
SIZE(struct client, 32);

struct affinity {
	__u64 last_used;	/* nanoseconds of CLOCK_MONOTONIC */
	__u32 backend;
	__u32 pad;
};
SIZE(struct affinity, 16);

/*
 * A socket and who it really talks to. A stream socket has one peer, so its key leaves address
 * and port zero and the value names the peer.
 */
struct peer {
	__u64 socket;		/* cookie */
	struct address address;
	__be16 port;
	__u16 pad;
	__u32 pad2;
};
SIZE(struct peer, 32);

/* What the socket's owner asked for, and which backend it got. */
struct origin {
	struct frontend frontend;
	__u32 backend;
	struct address address;
	__be16 port;
	__u16 pad;
};
SIZE(struct origin, 44);

/* A datagram socket and a frontend it sends to. Without frontend: the head of its chain. */
struct sender {
	__u64 socket;		/* cookie */
	struct frontend frontend;
	__u32 pad;
};
SIZE(struct sender, 32);

/* The backend it keeps, and the next link of the chain: the frontend it sent to before. */
struct assignment {
	__u32 service;
	__u32 backend;
	struct address address;
	__be16 port;
	__u16 pad;
	struct frontend older;
};
SIZE(struct assignment, 48);

enum setting_flag {
	SETTING_GUARD_NODEPORTS = 1,	/* bind() to a NodePort in the host namespace fails */
};

/* What an operator chose, and what the agent found out about this node. */
struct settings {
	__u64 host_netns;	/* cookie of the node's own network namespace; 0: the initial one */
	__u64 writes;		/* odd while the agent is writing the maps */
	__u32 flags;		/* enum setting_flag */
	__u32 pad;
};
SIZE(struct settings, 24);

struct service_counters {
	__u64 chosen;		/* connections and datagram flows given a backend */
	__u64 sticky;		/* of these: by session affinity */
	__u64 refused;		/* no endpoint anywhere */
	__u64 not_here;		/* endpoints, but none that the policy Local allows */
};
SIZE(struct service_counters, 32);

struct backend_counters {
	__u64 opened;
	__u64 closed;		/* sockets released; missing for those the LRU forgot */
};
SIZE(struct backend_counters, 16);

/* Names for people, so that the maps explain themselves while no agent runs. NUL-padded. */
struct service_name {
	char namespace[64];
	char service[64];
	char port[16];
	__u8 protocol;
	__u8 family;		/* 4 or 6 */
	__u8 pad[6];
};
SIZE(struct service_name, 152);

struct backend_name {
	char node[64];
	char target[64];	/* the pod; longer names are cut */
};
SIZE(struct backend_name, 128);

/* Every outcome has a name and a counter. */
enum verdict {
	VERDICT_PASSED = 0,	/* no frontend of ours: left alone */
	VERDICT_TRANSLATED = 1,	/* sent to a backend */
	VERDICT_REFUSED = 2,	/* no endpoint anywhere: connection refused */
	VERDICT_NOT_HERE = 3,	/* endpoints, but none here, and the policy is Local: time-out */
	VERDICT_SLOT_LOST = 4,	/* what we read changed hands twice in a row: refused */
	VERDICT_SLOT_RETRIED = 5,	/* what we read changed hands once: looked up again */
	VERDICT_RESTORED = 6,	/* the backend's address was shown as the frontend's */
	VERDICT_PORT_TAKEN = 7,	/* bind() to a NodePort: address in use */
	VERDICTS = 8,		/* how many */
};

#endif
