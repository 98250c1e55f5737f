/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Finds, creates and deletes the entries of flows, and applies them to packets. An entry is one
 * direction at one hook; a flow has two or four. TCP has its own map of entries, so that a flood of
 * datagrams evicts no connection. Every creation and deletion by a packet is counted, so that
 * the agent can compute how many the LRU evicted.
 */
#ifndef EBPFLB_ENGINE_FLOWS_TABLE_H
#define EBPFLB_ENGINE_FLOWS_TABLE_H

#include "core/check.h"
#include "core/tuple.h"

/*
 * An entry names its tuple and its translation by a check (core/check.h). A program translates
 * packets, and deletes entries of other tuples, only by copies whose check is right, or if the
 * entries to delete lead back to the flow (request_leads_to). It writes a packet's notes into an
 * entry only if that is still the entry that it copied.
 */

/*
 * Copies an entry, and returns whether the copy belongs to this tuple: the LRU may have given the
 * entry to another tuple meanwhile.
 */
static __always_inline bool flow_copy(struct flow *copy, const struct tuple *tuple,
				      const struct flow *flow)
{
	return COPY_CHECKED(copy, tuple, flow);
}

/* Whether the entry is still the one that was copied. Call it right before writing the entry. */
static __always_inline bool flow_remains(const struct flow *flow, const struct flow *copy)
{
	barrier();
	return flow->check == copy->check;
}

/*
 * Here and below OPAQUE keeps the two calls apart: otherwise the compiler merges them into one call
 * on either map, for which the kernel cannot use the map's own code.
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

/* Stores an entry whose check is already set. */
static __always_inline long flow_store(const struct tuple *tuple, const struct flow *flow,
				       __u64 flags)
{
	long failed;

	if (tuple->protocol != TCP)
		return bpf_map_update_elem(MAP(other_flows), tuple, flow, flags);
	failed = bpf_map_update_elem(MAP(tcp_flows), tuple, flow, flags);
	OPAQUE(failed);
	return failed;
}

static __always_inline long flow_update(const struct tuple *tuple, struct flow *flow, __u64 flags)
{
	flow->check = check_of(CHECK_SUM(tuple, flow));
	return flow_store(tuple, flow, flags);
}

static __always_inline struct flow_counters *flow_counters_of(const struct tuple *tuple)
{
	return LOOKUP_NUMBER(struct flow_counters, flow_stats, tuple->protocol != TCP);
}

/* Creates an entry whose check is already set; -EEXIST if this tuple has an entry. */
static __always_inline long flow_create_named(const struct tuple *tuple, const struct flow *flow)
{
	struct flow_counters *counters = flow_counters_of(tuple);
	long failed = flow_store(tuple, flow, BPF_NOEXIST);

	if (counters && !failed)
		counters->created += 1;
	else if (counters && failed != -EEXIST)
		counters->full += 1;
	return failed;
}

/* Creates an entry; -EEXIST if this tuple already has one. */
static __always_inline long flow_create(const struct tuple *tuple, struct flow *flow)
{
	flow->check = check_of(CHECK_SUM(tuple, flow));
	return flow_create_named(tuple, flow);
}

/* Creates an entry, or overwrites this tuple's entry. */
static __always_inline long flow_write(const struct tuple *tuple, struct flow *flow)
{
	if (!flow_create(tuple, flow))
		return 0;
	return flow_store(tuple, flow, BPF_ANY);
}

/* Deletes an entry, and does not count that. */
static __always_inline long flow_remove(const struct tuple *tuple)
{
	long failed;

	if (tuple->protocol != TCP)
		return bpf_map_delete_elem(MAP(other_flows), tuple);
	failed = bpf_map_delete_elem(MAP(tcp_flows), tuple);
	OPAQUE(failed);
	return failed;
}

static __always_inline void flow_delete(const struct tuple *tuple)
{
	struct flow_counters *counters = flow_counters_of(tuple);

	if (!flow_remove(tuple) && counters)
		counters->deleted += 1;
}

/* Returns the packet's tuple after its hook: see enum flow_kind. */
static __always_inline struct tuple flow_translate(const struct tuple *tuple,
						   const struct flow *flow)
{
	struct tuple to = *tuple;

	if (tuple->hook == HOOK_INGRESS) {
		to.destination = flow->address;
		to.destination_port = flow->port;
		to.source_port = flow->other_port;
	} else {
		to.source = flow->address;
		to.source_port = flow->port;
		to.destination_port = flow->other_port;
	}
	return to;
}

/* The entry of the opposite direction's packets, from the translated tuple. */
static __always_inline struct flow *flow_opposite(const struct tuple *translated)
{
	__u8 hook = translated->hook == HOOK_INGRESS ? HOOK_EGRESS : HOOK_INGRESS;
	struct tuple tuple = tuple_reverse(translated, hook);

	return flow_find(&tuple);
}

/*
 * Whether the connection has ended: both sides sent FIN, or one sent RST. The arguments are the
 * flags of the entries of both directions.
 */
static __always_inline bool flow_has_ended(__u32 one, __u32 other)
{
	return (one | other) & FLOW_RST || one & other & FLOW_FIN;
}

#endif
