/* SPDX-License-Identifier: GPL-2.0 */
/*
 * If conntrack is full, the oldest half-open flow of those that were opened here is removed for a new
 * one. nf_conntrack does so by itself for packets, but for the functions that are called here it
 * looks in the first eight buckets of its table only (nf_conntrack_alloc, up to 6.18).
 */
#ifndef EBPFLB_ENGINE_CONNTRACK_EVICT_H
#define EBPFLB_ENGINE_CONNTRACK_EVICT_H

#include "engine/conntrack/opening.h"

#define EVICT_OLDEST 2
#define EVICT_TRIES 8
#define EVICT_LATEST 1024	/* flows that shall have time for an answer, while others are removed */

/* As the kernel has it, early_drop_list. A stream that was offloaded at once is never assured. */
#define EVICT_NONE_OF (CT_STATUS_ASSURED | CT_STATUS_OFFLOAD)

/*
 * The number of the flow that is asked next: first the oldest that was not asked yet. A flood opens as
 * many flows as it makes end, so they stay ahead of it by all places. Where those have ended, or the
 * latest are all that is left, one of these by chance, so that the very latest has time too.
 */
static __always_inline __u64 opening_to_ask(struct opening_counts *counts, int tries)
{
	if (counts->tried + OPENINGS < counts->opened)
		counts->tried = counts->opened - OPENINGS;
	if (tries < EVICT_OLDEST && counts->tried + EVICT_LATEST < counts->opened)
		return counts->tried++;
	return counts->opened - 1 - bpf_get_prandom_u32() % EVICT_LATEST;
}

/*
 * A place that no flow has taken yet names none that conntrack knows. An entry that has expired is
 * removed by the next look-up.
 */
static __always_inline void opening_evict(struct __sk_buff *ctx)
{
	struct opening_counts *counts = opening_counts_find();
	struct opening *place;
	EMPTY(struct ct_key, key);
	__u64 status;

	for (int i = 0; i < EVICT_TRIES && counts; i++) {
		place = opening_at(opening_to_ask(counts, i));
		if (!place)
			return;
		ct_key_write(key, &place->tuple);
		status = opening_expire(ctx, key, EVICT_NONE_OF);
		if (status && !(status & EVICT_NONE_OF)) {
			ct_find(ctx, key);
			return;
		}
	}
}

#endif
