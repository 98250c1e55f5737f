/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The flows that packets belong to: looked up, made, ended. TCP's lie apart from the others'.
 * Every entry that is made or ended is counted, so that the agent can tell what the LRU took.
 */
#ifndef EBPFLB_PATH_FLOW_H
#define EBPFLB_PATH_FLOW_H

#include "maps.h"
#include "net/packet.h"

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

/* The packet as it is after its hook. */
static __always_inline struct tuple flow_translate(const struct tuple *tuple,
						   const struct flow *flow)
{
	struct tuple to = *tuple;

	if (tuple->hook == HOOK_INGRESS) {
		to.destination = flow->address;
		to.destination_port = flow->port;
		if (flow->other_port)
			to.source_port = flow->other_port;
	} else {
		to.source = flow->address;
		to.source_port = flow->port;
		if (flow->other_port)
			to.destination_port = flow->other_port;
	}
	return to;
}

/* The answer to a packet, as this hook would see it. */
static __always_inline struct tuple tuple_reverse(const struct tuple *tuple, __u8 hook)
{
	return (struct tuple){ .source = tuple->destination,
			       .destination = tuple->source,
			       .source_port = tuple->destination_port,
			       .destination_port = tuple->source_port,
			       .protocol = tuple->protocol,
			       .hook = hook };
}

/* Evenly spread, and always the same for a tuple. */
static __always_inline __u32 tuple_draw(const struct tuple *tuple)
{
	const __u32 *words = (const __u32 *)tuple;
	__u64 mixed = 0;

	UNROLL
	for (int i = 0; i < (int)sizeof(*tuple) / 4; i++) {
		mixed = (mixed ^ words[i]) * 0x9e3779b97f4a7c15ULL;
		mixed ^= mixed >> 32;
	}
	return mixed;
}

/* By the flags of both sides' entries: each has closed, or one has reset. */
static __always_inline bool flow_is_done(__u32 one, __u32 other)
{
	return (one | other) & FLOW_RST || one & other & FLOW_FIN;
}

/*
 * A packet of it has come by. One that opens a connection says nothing yet of its client: the
 * address may be forged. So may a reset that others follow: who has reset sends nothing more.
 */
static __always_inline void flow_touch(struct flow *flow, const struct packet *packet, __u64 now)
{
	bool opens = packet->opens && packet->tuple.protocol != UDP;
	__u32 before = opens || packet->ends ? flow->flags : flow->flags & ~FLOW_RST;
	__u32 flags = before | packet->ends | (opens ? 0 : FLOW_SEEN);

	if (flow->flags != flags)
		flow->flags = flags;
	if (flow->last_seen != now)
		flow->last_seen = now;
}

#endif
