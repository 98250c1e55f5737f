/* SPDX-License-Identifier: GPL-2.0 */
/*
 * An entry names its tuple and its translation by a check (core/check.h). Packets are translated, and
 * entries of other tuples deleted, by copies whose check is right, or where the entries that would be
 * deleted lead back (request_leads_to). What a packet notes in an entry is written if it still is the
 * one that was copied.
 */
#ifndef EBPFLB_ENGINE_FLOWS_COPY_H
#define EBPFLB_ENGINE_FLOWS_COPY_H

#include "core/check.h"

/*
 * Whether the copy of an entry is one of this tuple; false if the LRU has given the entry to another
 * tuple meanwhile.
 */
static __always_inline bool flow_copy(struct flow *copy, const struct tuple *tuple,
				      const struct flow *flow)
{
	return COPY_CHECKED(copy, tuple, flow);
}

/* Whether an entry still is the one that was copied; to be asked right before it is written. */
static __always_inline bool flow_remains(const struct flow *flow, const struct flow *copy)
{
	barrier();
	return flow->check == copy->check;
}

#endif
