/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The decision of a packet hook: the verdict to count, and whether the packet gets a new tuple. A
 * verdict is counted and leads to an action. `decided`: this step has settled the packet, and later
 * steps do not run.
 */
#ifndef EBPFLB_CORE_OUTCOME_H
#define EBPFLB_CORE_OUTCOME_H

#include "core/settings.h"

/* What happens to a packet. A program returns the action to the kernel, except REJECT. */
enum action {
	GO_ON = -1,	/* TC_ACT_UNSPEC, TCX_NEXT: the next program runs */
	DROP = 2,	/* TC_ACT_SHOT */
	REJECT,		/* the packet becomes its reply, mostly a refusal (path/reject_packet.h) */
};

struct outcome {
	enum verdict verdict;	/* VERDICT_PASSED if nothing is decided */
	__u32 rewrite;		/* a boolean; with bool FORGET_VALUE would be a comparison */
	bool decided;
};

/* Leaves the packet to the next step; after the last step the packet goes on. */
static __always_inline struct outcome undecided(void)
{
	return (struct outcome){ .verdict = VERDICT_PASSED };
}

/* The packet keeps its tuple; the verdict says whether it goes on. */
static __always_inline struct outcome unchanged(enum verdict verdict)
{
	return (struct outcome){ .verdict = verdict, .decided = true };
}

/* The packet goes on with its new tuple. */
static __always_inline struct outcome rewritten(enum verdict verdict)
{
	return (struct outcome){ .verdict = verdict, .rewrite = true, .decided = true };
}

static __always_inline enum action action_of(enum verdict verdict)
{
	switch (verdict) {
	case VERDICT_REFUSED:
	case VERDICT_TOO_LONG:
	case VERDICT_PING_ANSWERED:
		return REJECT;
	case VERDICT_NO_LOCAL_ENDPOINT:
	case VERDICT_RECYCLED:
	case VERDICT_PORTS_EXHAUSTED:
	case VERDICT_FLOWS_FULL:
	case VERDICT_SOURCE_DENIED:
	case VERDICT_UNALLOCATED:
	case VERDICT_UNKNOWN_PORT:
	case VERDICT_REDIRECT:
	case VERDICT_REJECT_LIMITED:
		return DROP;
	default:
		return GO_ON;
	}
}

/* Like action_of, but with --shadow every packet goes on. */
static __always_inline enum action action_in_force(enum verdict verdict)
{
	enum action action = action_of(verdict);

	return action != GO_ON && is_shadow() ? GO_ON : action;
}

#endif
