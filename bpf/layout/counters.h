/* SPDX-License-Identifier: GPL-2.0 */
/* What is counted of services, backends and flows; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_COUNTERS_H
#define EBPFLB_LAYOUT_COUNTERS_H

struct service_counters {
	__u64 chosen;		/* connections and flows of datagrams that got a backend */
	__u64 by_affinity;		/* of these, by session affinity */
	__u64 refused;		/* no endpoint on any node */
	__u64 no_local_endpoint;		/* endpoints, but none on this node, and the policy is Local */
};
SIZE(struct service_counters, 32);

struct backend_counters {
	__u64 opened;
	__u64 closed;		/* sockets released, and those that were not remembered */
};
SIZE(struct backend_counters, 16);

/* What packets have done to a map of flows, on one CPU. */
struct flow_counters {
	__u64 created;		/* entries */
	__u64 deleted;		/* entries, for a newer flow */
	__u64 full;		/* entries that were not created: the map was full */
	__u64 displaced;	/* half-open flows deleted for newer ones */
};
SIZE(struct flow_counters, 32);

/* What the agent's sweeps have done to a map of flows. */
struct sweep {
	__u64 swept;		/* entries deleted */
	__u64 entries;		/* that were there after the last sweep */
	__u64 evicted;		/* entries that the LRU evicted, up to the last sweep */
};
SIZE(struct sweep, 24);

#endif
