/* SPDX-License-Identifier: GPL-2.0 */
/* A flow gives way to a newer one of the same tuple: all its entries go, the answers' first. */
#ifndef EBPFLB_PATH_FLOW_CLOSE_H
#define EBPFLB_PATH_FLOW_CLOSE_H

#include "path/flow.h"

/* The source port of a flow that has ended may be another's by now (masquerade.h). */
static __always_inline void close_answers(const struct tuple *there, const struct flow *flow)
{
	struct tuple masqueraded = flow_translate(there, flow);
	struct tuple back = tuple_reverse(&masqueraded, HOOK_INGRESS);
	struct flow *answers = flow_find(&back);

	if (answers && answers->port == there->source_port &&
	    address_equal(&answers->address, &there->source))
		flow_end(&back);
}

static __always_inline void close_masquerade(const struct tuple *there)
{
	struct flow *flow = flow_find(there);

	if (flow && flow->port)
		close_answers(there, flow);
	flow_end(there);
}

static __always_inline void flow_close(const struct tuple *asked, const struct flow *flow)
{
	bool masqueraded = flow->flags & FLOW_MASQUERADE;
	struct tuple there = flow_translate(asked, flow);
	struct tuple back = tuple_reverse(&there, HOOK_EGRESS);

	flow_end(&back);
	if (masqueraded) {
		there.hook = HOOK_EGRESS;
		close_masquerade(&there);
	}
	flow_end(asked);
}

#endif
