/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The counters of each CPU: verdicts, and the connections of services and backends.
 *
 * A program can interrupt another one on its CPU, and CPUs from COUNTER_PARTS on share a part. So
 * the backends' counters are added to atomically: they tell the agent whether a backend may have
 * open sockets. The services' counters are only shown to people, so an addition there may get lost.
 */
#ifndef EBPFLB_CORE_COUNTERS_H
#define EBPFLB_CORE_COUNTERS_H

#include "maps.h"
#include "record/record.h"

static __always_inline enum verdict verdict_count(enum verdict verdict)
{
	__u64 *counter = LOOKUP_NUMBER(__u64, verdicts, verdict);

	record(STEP_VERDICT, verdict);
	if (counter)
		*counter += 1;
	return verdict;
}

/* Returns the counters of an id on this CPU, from a map of the kind CPU_ARRAYS. */
#define CPU_COUNTERS(type, map, id) \
	LOOKUP_NUMBER(type, map, \
		      bpf_get_smp_processor_id() % COUNTER_PARTS * ENTRIES_##map + (id))

static __always_inline void service_count_chosen(__u32 service, bool by_affinity)
{
	struct service_counters *counters = CPU_COUNTERS(struct service_counters, service_stats, service);

	if (!counters)
		return;
	counters->chosen += 1;
	if (by_affinity)
		counters->by_affinity += 1;
}

/* A client got no backend. has_endpoints: some node has endpoints, but it may not use them. */
static __always_inline void service_count_no_backend(__u32 service, bool has_endpoints)
{
	struct service_counters *counters = CPU_COUNTERS(struct service_counters, service_stats, service);

	if (counters && has_endpoints)
		counters->no_local_endpoint += 1;
	else if (counters)
		counters->refused += 1;
}

/*
 * Loads the counters that backend_count_opened will need, if this is the backend. Call it before its
 * slot is read: then the CPU waits for both cache misses at once (docs/benchmarks.md).
 */
static __always_inline void backend_expect(__u32 backend)
{
	struct backend_counters *counters = CPU_COUNTERS(struct backend_counters, backend_stats, backend);
	__u64 opened = counters ? counters->opened : 0;

	OPAQUE(opened);
}

static __always_inline void backend_count_opened(__u32 backend)
{
	struct backend_counters *counters = CPU_COUNTERS(struct backend_counters, backend_stats, backend);

	if (counters)
		__sync_fetch_and_add(&counters->opened, 1);
}

static __always_inline void backend_count_closed(__u32 backend)
{
	struct backend_counters *counters = CPU_COUNTERS(struct backend_counters, backend_stats, backend);

	if (counters)
		__sync_fetch_and_add(&counters->closed, 1);
}

#endif
