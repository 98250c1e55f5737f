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

/* The tuples of a flow that is ended because another gets its port. */
struct ending {
	struct tuple between;	/* its requests at egress, before SNAT */
	struct tuple reply_tuple;
	struct tuple request_tuple;
};
SIZE(struct ending, 120);

/* Intermediate results while a flow is opened: too large for a program's stack. */
struct scratch {
	struct selection selection;
	struct flow request_entry;	/* the new entries: FLOW_DNAT or FLOW_DIRECT */
	struct flow reply_entry;	/* FLOW_UN_DNAT or FLOW_UN_DIRECT */
	struct flow snat_entry;	/* FLOW_SNAT_PENDING */
	struct tuple reply_tuple;
	struct tuple snat_tuple;
	struct tuple former_request_tuple;	/* of the flow that has reply_tuple already */
	struct tuple claim;	/* of the port that reply_tuple is about to take over */
	struct ending ending;	/* of the flow that has that port */
	__u64 holder_created;	/* of the flow that has a port: when its reply's entry was created */
	__u64 oldest;		/* when that flow was last used */
	__u64 oldest_created;	/* its holder_created */
	__be16 oldest_port;
	__u8 pad[6];
};
SIZE(struct scratch, 568);

/* How many more packets may be refused with a reply until the budget is refilled. */
struct reject_budget {
	__u64 refilled;		/* nanoseconds of CLOCK_MONOTONIC */
	__u64 left;
};
SIZE(struct reject_budget, 16);

#endif
