/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Whether the flow tables may hold any flow. On the engine netfilter they mostly hold none, and each
 * packet is spared a look-up. The agent closes the gate before it attaches the first programs, and when
 * it has found no flow twice (ebpflb/kernel/maps/sweep.py); each flow that is opened opens it.
 */
#ifndef EBPFLB_ENGINE_FLOWS_GATE_H
#define EBPFLB_ENGINE_FLOWS_GATE_H

#include "maps.h"

static __always_inline bool flows_may_exist(void)
{
	struct flow_gate *gate = ONLY_VALUE(struct flow_gate, flow_gate);

	return gate->empty != gate->opened + 1;
}

/* Whether connections are noted that get no answer (path/attempt.h). */
static __always_inline bool attempts_are_noted(void)
{
	return ONLY_VALUE(struct flow_gate, flow_gate)->endpoint_health;
}

/* To be called before a flow gets its first entry. */
static __always_inline void gate_open(void)
{
	__sync_fetch_and_add(&ONLY_VALUE(struct flow_gate, flow_gate)->opened, 1);
}

#endif
