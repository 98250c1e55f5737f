/* SPDX-License-Identifier: GPL-2.0 */
/* The memory that is too small on the stack: one packet's on this CPU. */
#ifndef EBPFLB_CORE_SCRATCH_H
#define EBPFLB_CORE_SCRATCH_H

#include "maps.h"

static __always_inline struct scratch *scratch_here(void)
{
	return LOOKUP_NUMBER(struct scratch, scratch, 0);
}

/*
 * Memory for a packet at this hook, in which what is read of it is empty; of an assignment clang makes
 * three times as many stores. Nobody below the hook asks for it.
 */
static __always_inline struct scratch *scratch_begin(const enum hook hook)
{
	struct scratch *scratch = scratch_here();
	__u64 *words;

	if (!scratch)
		return NULL;
	words = (__u64 *)&scratch->packet;
	UNROLL
	for (__u32 i = 0; i < sizeof(scratch->packet) / sizeof(*words); i++)
		words[i] = 0;
	scratch->packet.tuple.hook = hook;
	scratch->onward.device = 0;
	scratch->onward.mtu = 0;
	return scratch;
}

#endif
