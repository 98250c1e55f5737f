/* SPDX-License-Identifier: GPL-2.0 */
/* What a program keeps for one packet or one second, on one CPU; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_SCRATCH_H
#define EBPFLB_LAYOUT_SCRATCH_H

/* The result of select_backend (path/select.h). */
struct selection {
	struct service service;
	struct backend backend;
	__u8 is_local_client;	/* client_is_local (path/client.h) */
	__u8 is_assigned;	/* a datagram socket keeps the backend that it has */
	__u8 is_pending;	/* session affinity is to be remembered once the client is known */
	__u8 pad;
};
SIZE(struct selection, 88);

/* Intermediate results while a flow is opened: too large for a program's stack. */
struct scratch {
	struct selection selection;
	struct flow request_entry;	/* the new entries: FLOW_DNAT or FLOW_DIRECT */
	struct flow reply_entry;	/* FLOW_UN_DNAT or FLOW_UN_DIRECT */
	struct flow snat_entry;	/* FLOW_SNAT_PENDING */
	struct tuple reply_tuple;
	struct tuple snat_tuple;
	struct tuple former_request_tuple;	/* of the flow that has reply_tuple already */
};
SIZE(struct scratch, 376);

/* How many more packets may be refused with a reply until the budget is refilled. */
struct reject_budget {
	__u64 refilled;		/* nanoseconds of CLOCK_MONOTONIC */
	__u64 left;
};
SIZE(struct reject_budget, 16);

#endif
