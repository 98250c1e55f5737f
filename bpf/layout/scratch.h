/* SPDX-License-Identifier: GPL-2.0 */
/* What a program keeps for one packet or one second, on one CPU; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_SCRATCH_H
#define EBPFLB_LAYOUT_SCRATCH_H

/* What is worked out while a flow is opened: too large for a program's stack. */
struct scratch {
	struct flow flow;
	struct tuple back;	/* the backend's packets */
	struct tuple other;	/* another entry of the flow, or of the one that is in its way */
	struct service service;
	struct backend backend;
	__u32 pad;
};
SIZE(struct scratch, 224);

/* How many more packets may be refused with an answer until it is refilled. */
struct reject_budget {
	__u64 refilled;		/* nanoseconds of CLOCK_MONOTONIC */
	__u64 left;
};
SIZE(struct reject_budget, 16);

#endif
