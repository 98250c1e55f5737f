/* SPDX-License-Identifier: GPL-2.0 */
/*
 * An entry names its tuple and its translation by a check (core/check.h). A program translates
 * packets, and deletes entries of other tuples, only by copies whose check is right, or if the
 * entries to delete lead back to the flow (request_leads_to). It writes a packet's notes into an
 * entry only if that is still the entry that it copied.
 */
#ifndef EBPFLB_ENGINE_FLOWS_COPY_H
#define EBPFLB_ENGINE_FLOWS_COPY_H

#include "core/check.h"

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

#endif
