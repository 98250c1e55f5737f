/* SPDX-License-Identifier: GPL-2.0 */
/*
 * How a packet is told no: as a socket with no listener would, a thousand times a second and
 * CPU; beyond that it is dropped, so that nobody can make us a source of floods.
 */
#ifndef EBPFLB_PATH_REJECT_PACKET_H
#define EBPFLB_PATH_REJECT_PACKET_H

#include "net/reset.h"
#include "net/unreachable.h"
#include "path/tuple.h"
#include "path/verdict.h"

#define ANSWERS 1000
#define REFILL 1000000000ULL	/* ns */

static __always_inline bool answer_allowed(void)
{
	__u32 only = 0;
	struct reject_budget *allowance = LOOKUP(struct reject_budget, reject_budgets, &only);
	__u64 now = clock_coarse();

	if (!allowance)
		return false;
	if (now >= allowance->refilled + REFILL) {
		allowance->refilled = now;
		allowance->left = ANSWERS;
	}
	if (!allowance->left)
		return false;
	allowance->left -= 1;
	return true;
}

/* Turns the packet into its refusal. What has options or extension headers is not answered. */
static __always_inline bool refuse(struct __sk_buff *ctx, const struct packet *packet)
{
	struct tuple to = tuple_reverse(&packet->tuple, 0);

	if (packet->options || packet->piece == LATER || !answer_allowed())
		return false;
	if (packet->tuple.protocol == TCP)
		return answer_reset(ctx, packet, &to);
	return packet->v6 ? answer_unreachable_v6(ctx, packet, &to)
			  : answer_unreachable_v4(ctx, packet, &to);
}

#endif
