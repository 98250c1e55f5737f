/* SPDX-License-Identifier: GPL-2.0 */
/* What is counted of services, backends and flows; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_COUNTERS_H
#define EBPFLB_LAYOUT_COUNTERS_H

struct service_counters {
	__u64 chosen;		/* connections and datagram flows given a backend */
	__u64 sticky;		/* of these: by session affinity */
	__u64 refused;		/* no endpoint anywhere */
	__u64 no_local_endpoint;		/* endpoints, but none that the policy Local allows */
};
SIZE(struct service_counters, 32);

struct backend_counters {
	__u64 opened;
	__u64 closed;		/* sockets released; missing for those the LRU forgot */
};
SIZE(struct backend_counters, 16);

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

#endif
