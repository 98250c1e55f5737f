/* SPDX-License-Identifier: GPL-2.0 */
/* What a packet's tuple becomes: translated, answered, or a number to draw a backend by. */
#ifndef EBPFLB_PATH_TUPLE_H
#define EBPFLB_PATH_TUPLE_H

#include "net/packet.h"

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

#endif
