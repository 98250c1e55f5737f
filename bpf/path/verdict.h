/* SPDX-License-Identifier: GPL-2.0 */
/* Every outcome is counted: by verdict, by service and by backend, per CPU. */
#ifndef EBPFLB_PATH_VERDICT_H
#define EBPFLB_PATH_VERDICT_H

#include "maps.h"

static __always_inline enum verdict verdict_count(enum verdict verdict)
{
	__u32 index = verdict;
	__u64 *counter = LOOKUP(__u64, verdicts, &index);

	if (counter)
		*counter += 1;
	return verdict;
}

static __always_inline void service_count_chosen(__u32 service, bool sticky)
{
	struct service_counters *counters = LOOKUP(struct service_counters, service_stats, &service);

	if (!counters)
		return;
	counters->chosen += 1;
	counters->sticky += sticky;
}

/* A service without a backend for this caller: the verdict says why. */
static __always_inline enum verdict service_count_denied(__u32 service, enum verdict verdict)
{
	struct service_counters *counters = LOOKUP(struct service_counters, service_stats, &service);

	if (counters && verdict == VERDICT_NO_LOCAL_ENDPOINT)
		counters->no_local_endpoint += 1;
	else if (counters)
		counters->refused += 1;
	return verdict;
}

static __always_inline void backend_count_opened(__u32 backend)
{
	struct backend_counters *counters = LOOKUP(struct backend_counters, backend_stats, &backend);

	if (counters)
		counters->opened += 1;
}

static __always_inline void backend_count_closed(__u32 backend)
{
	struct backend_counters *counters = LOOKUP(struct backend_counters, backend_stats, &backend);

	if (counters)
		counters->closed += 1;
}

#endif
