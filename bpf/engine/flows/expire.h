/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Removes a flow that the agent takes for expired, unless it was used since the agent read it. A
 * packet that opens a connection may replace a closed flow at any moment. If the agent deleted the
 * entries itself, by system calls, it would delete some of the new connection's, whose packets
 * would then not be translated. From the last comparison to the deletion it is some ten
 * nanoseconds here, less than a packet takes from deleting an old entry to creating the new one.
 */
#ifndef EBPFLB_ENGINE_FLOWS_EXPIRE_H
#define EBPFLB_ENGINE_FLOWS_EXPIRE_H

#include "engine/flows/close.h"

static __always_inline bool entry_was_used(const struct expired_entry *entry)
{
	struct flow *flow = flow_find(&entry->tuple);

	return flow && flow->last_seen != entry->time;
}

/* Returns whether the entry is deleted; `resting` is memory for an entry that rests. */
static __always_inline bool entry_expire(const struct expired_entry *entry, struct flow *resting)
{
	struct flow *flow = flow_find(&entry->tuple);

	if (!flow || flow->last_seen != entry->time)
		return false;
	if (entry->end == ENTRY_RESTS) {
		port_rest(&entry->tuple, flow, resting);
		return false;
	}
	return !flow_remove(&entry->tuple);
}

/* Returns the numbers of the entries that are deleted, as bits. */
static __always_inline __u32 flow_expire(const struct expired_entry *entries, struct flow *resting)
{
	__u32 deleted = 0;

	UNROLL
	for (int i = 0; i < FLOW_ENTRIES; i++)
		if (entry_was_used(&entries[i]))
			return 0;
	UNROLL
	for (int i = 0; i < FLOW_ENTRIES; i++)
		deleted |= entry_expire(&entries[i], resting) << i;
	return deleted;
}

#endif
