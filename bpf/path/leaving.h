/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Notes what a packet at egress says about its endpoint, before anything else is done with it. Most say
 * nothing.
 */
#ifndef EBPFLB_PATH_LEAVING_H
#define EBPFLB_PATH_LEAVING_H

#include "engine/flows/gate.h"
#include "net/glance.h"
#include "path/attempt.h"
#include "path/stale_endpoint.h"

static __always_inline void leaving_note(struct __sk_buff *ctx)
{
	struct tuple tuple = { .hook = HOOK_EGRESS };

	if (!leaving_matters() || !glance(ctx, &tuple))
		return;
	if (tuple.protocol == UDP && stale_endpoints_exist())
		stale_datagram_report(&tuple);
	if (tuple.protocol == TCP && attempts_are_noted())
		attempt_answer(ctx, &tuple);
}

#endif
