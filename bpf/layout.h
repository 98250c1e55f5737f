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
	SERVICE_RESTRICTED = 16,	/* only clients in its source_ranges are let in */
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
	BACKEND_HERE = 4,	/* the endpoint is on this node */
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

enum hook {
	HOOK_INGRESS = 1,	/* a packet comes in from a device: destinations are rewritten */
	HOOK_EGRESS = 2,	/* a packet leaves by a device: sources are rewritten */
};

/* A packet as a hook sees it. */
struct tuple {
	struct address source;
	struct address destination;
	__be16 source_port;
	__be16 destination_port;
	__u8 protocol;
	__u8 hook;		/* enum hook */
	__u16 pad;
};
SIZE(struct tuple, 40);

enum flow_flag {
	FLOW_REQUEST = 1,	/* the client's packets; else the backend's */
	FLOW_MASQUERADE = 2,	/* the backend sees this node as its client */
	FLOW_SEEN = 4,		/* such a packet has come by, other than what opens a connection */
	FLOW_FIN = 8,		/* this side has closed; TCP and SCTP */
	FLOW_RST = 16,		/* this side has reset, or aborted */
};

/*
 * What becomes of a packet: its destination at ingress, its source at egress. A flow through F
 * from C to B has two entries, and two more where it is masqueraded as N:
 *
 *   ingress  C -> F  destination := B        egress  C -> B  source := N
 *   ingress  B -> N  destination := C        egress  B -> C  source := F
 */
struct flow {
	__u64 last_seen;	/* nanoseconds of CLOCK_MONOTONIC */
	__u64 created;
	struct address address;
	__be16 port;		/* 0: egress has not chosen the masquerade yet */
	__be16 other_port;	/* what the other side's port becomes; 0: it stays */
	__u32 service;
	__u32 backend;
	__u32 flags;		/* enum flow_flag */
	__u32 ifindex;		/* where the client's packets come in */
	__u32 pad;
};
SIZE(struct flow, 56);

/* Where the opening of a flow is worked out, on one CPU: too large for a program's stack. */
struct arrival {
	struct flow flow;
	struct tuple back;	/* the backend's packets */
	struct tuple other;	/* another entry of the flow, or of the one that is in its way */
	struct service service;
	struct backend backend;
	__u32 pad;
};
SIZE(struct arrival, 224);

/* An IP datagram in fragments, as a hook sees it. */
struct datagram {
	struct address source;
	struct address destination;
	__u32 id;
	__u8 protocol;
	__u8 hook;		/* enum hook */
	__u16 pad;
};
SIZE(struct datagram, 40);

/* What only its first fragment says. */
struct ports {
	__u64 seen;		/* nanoseconds of CLOCK_MONOTONIC */
	__be16 source_port;
	__be16 destination_port;
	__u32 pad;
};
SIZE(struct ports, 16);

/* What the packets of a map of flows have done to it, on one CPU. */
struct flow_counters {
	__u64 made;		/* entries */
	__u64 ended;		/* entries deleted for a newer flow */
	__u64 refused;		/* entries that found no room */
};
SIZE(struct flow_counters, 24);

/* What the agent's sweeps have done to it. */
struct sweep {
	__u64 swept;		/* entries deleted */
	__u64 held;		/* entries left by the last sweep */
	__u64 evicted;		/* entries that the LRU has taken, up to the last sweep */
};
SIZE(struct sweep, 24);

/* How many more packets may be refused with an answer, on one CPU. */
struct allowance {
	__u64 refilled;		/* nanoseconds of CLOCK_MONOTONIC */
	__u64 left;
};
SIZE(struct allowance, 16);

/* For a longest-prefix match: length counts the bits of all that follows it. */
struct source_range {
	__u32 length;
	__u32 service;
	struct address address;
};
SIZE(struct source_range, 24);

struct service_range {
	__u32 length;
	struct address address;
};
SIZE(struct service_range, 20);

enum device_flag {
	DEVICE_PODS = 1,	/* what comes in here is this node's pods' (detect-local by interface) */
};

/* A device, by its ifindex: as whom the masqueraded leave by it; unspecified: not at all. */
struct device {
	struct address v4;
	struct address v6;
	__u32 flags;		/* enum device_flag */
};
SIZE(struct device, 36);

/* All addresses that are equal to address under mask; none where mask leaves out a set bit. */
struct prefix {
	struct address address;
	struct address mask;
};
SIZE(struct prefix, 32);

enum setting_flag {
	SETTING_GUARD_NODEPORTS = 1,	/* bind() to a NodePort in the host namespace fails */
	SETTING_MASQUERADE_ALL = 2,	/* cluster IPs too, whoever asks */
	SETTING_MASQUERADE_HERE = 4,	/* external clients of a backend here too, as kube-proxy does */
	SETTING_DETECT_LOCAL = 8,	/* pods are told from others, by pods_* or DEVICE_PODS */
};

/* What an operator chose, and what the agent found out about this node. */
struct settings {
	__u64 host_netns;	/* cookie of the node's own network namespace; 0: the initial one */
	__u64 writes;		/* odd while the agent is writing the maps */
	__u32 flags;		/* enum setting_flag */
	__u16 first_port;	/* masqueraded flows get source ports from here ... */
	__u16 last_port;	/* ... to here, in host order */
	struct prefix pods_v4;	/* whose traffic counts as pods' */
	struct prefix pods_v6;
	struct prefix span_v4;	/* all cluster IPs and service ranges, and perhaps more */
	struct prefix span_v6;
	struct address node_v4;	/* the node's primary addresses, or unspecified */
	struct address node_v6;
};
SIZE(struct settings, 184);

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
	VERDICT_FOLLOWED = 8,	/* packet of a known flow: rewritten */
	VERDICT_RELATED = 9,	/* ICMP error about a known flow: rewritten */
	VERDICT_MASQUERADED = 10,	/* flow that goes on as this node's */
	VERDICT_PORT_CHANGED = 11,	/* flow whose client's port was in use by another to this backend */
	VERDICT_CROWDED = 12,	/* flow for which no free source port was found: dropped */
	VERDICT_FLOWS_FULL = 13,	/* no room for a flow: TCP dropped, others sent without state */
	VERDICT_FORBIDDEN = 14,	/* client outside loadBalancerSourceRanges: dropped */
	VERDICT_UNALLOCATED = 15,	/* address in a service range that no service has: dropped */
	VERDICT_MUTED = 16,	/* refused without an answer: there were too many lately */
	VERDICT_UNREADABLE = 17,	/* packet that is cut short or malformed: left alone */
	VERDICTS = 18,		/* how many */
};

#endif
