/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The flows that packets belong to: looked up, made, ended. TCP's lie apart from the others'.
 * Every entry that is made or ended is counted, so that the agent can tell what the LRU took.
 */
#ifndef EBPFLB_PATH_FLOW_H
#define EBPFLB_PATH_FLOW_H

#include "maps.h"
#include "path/tuple.h"

#define EEXIST 17

/*
 * Here and below the two calls are kept apart from each other: of one call on either map, which
 * the compiler would make of them, the kernel cannot make the map's own code.
 */
static __always_inline struct flow *flow_find(const struct tuple *tuple)
{
	struct flow *flow;

	if (tuple->protocol != TCP)
		return LOOKUP(struct flow, other_flows, tuple);
	flow = LOOKUP(struct flow, tcp_flows, tuple);
	OPAQUE(flow);
	return flow;
}

static __always_inline long flow_update(const struct tuple *tuple, const struct flow *flow,
					__u64 flags)
{
	long failed;

	if (tuple->protocol != TCP)
		return bpf_map_update_elem(MAP(other_flows), tuple, flow, flags);
	failed = bpf_map_update_elem(MAP(tcp_flows), tuple, flow, flags);
	OPAQUE(failed);
	return failed;
}

static __always_inline long flow_delete(const struct tuple *tuple)
{
	long failed;

	if (tuple->protocol != TCP)
		return bpf_map_delete_elem(MAP(other_flows), tuple);
	failed = bpf_map_delete_elem(MAP(tcp_flows), tuple);
	OPAQUE(failed);
	return failed;
}

static __always_inline struct flow_counters *flow_counters_of(const struct tuple *tuple)
{
	__u32 index = tuple->protocol != TCP;

	return LOOKUP(struct flow_counters, flow_stats, &index);
}

/* A new entry; -EEXIST where there is one of this tuple. */
static __always_inline long flow_claim(const struct tuple *tuple, const struct flow *flow)
{
	struct flow_counters *counters = flow_counters_of(tuple);
	long failed = flow_update(tuple, flow, BPF_NOEXIST);

	if (counters && !failed)
		counters->made += 1;
	else if (counters && failed != -EEXIST)
		counters->refused += 1;
	return failed;
}

static __always_inline void flow_end(const struct tuple *tuple)
{
	struct flow_counters *counters = flow_counters_of(tuple);

	if (!flow_delete(tuple) && counters)
		counters->ended += 1;
}

/* An entry, whether there was one of this tuple or not. */
static __always_inline long flow_put(const struct tuple *tuple, const struct flow *flow)
{
	if (!flow_claim(tuple, flow))
		return 0;
	return flow_update(tuple, flow, BPF_ANY);
}

/* By the flags of both sides' entries: each has closed, or one has reset. */
static __always_inline bool flow_is_done(__u32 one, __u32 other)
{
	return (one | other) & FLOW_RST || one & other & FLOW_FIN;
}

#endif
