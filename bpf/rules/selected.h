/* SPDX-License-Identifier: GPL-2.0 */
/* The result of the selection of a backend (path/select_backend.h), and the verdict that it implies. */
#ifndef EBPFLB_RULES_SELECTED_H
#define EBPFLB_RULES_SELECTED_H

#include "rules/policy.h"

enum selected {
	SELECTED,
	NO_SERVICE,
	NO_SUCH_PORT,		/* a service has the address as its cluster IP, but not this port */
	NOT_ALLOCATED,		/* the address is in a service range, but no service has it */
	NO_ENDPOINT,
	NO_LOCAL_ENDPOINT,
	PASSED_THROUGH,		/* no endpoint, and the network finds another one */
	SOURCE_DENIED,
	LEFT_TO_PACKETS,	/* a pod's socket: its packets are decided on when they leave the pod */
	AT_SOCKET,		/* a socket hook has translated it already */
	EXEMPT,			/* packets that rules in raw exempt from conntrack */
	SELECT_RECYCLED,	/* a map element was given to another service while it was read */
};

/* Returns the result for an address where no frontend matches. */
static __always_inline enum selected selected_without_service(const struct address *address)
{
	enum address_use use = address_use(address);

	record(STEP_ADDRESS_USE, use);
	return use == CLUSTER_IP ? NO_SUCH_PORT : use == UNALLOCATED ? NOT_ALLOCATED : NO_SERVICE;
}

static __always_inline bool is_for_nobody(enum selected selected)
{
	return selected == NO_SUCH_PORT || selected == NOT_ALLOCATED;
}

/*
 * Returns the verdict. At a cluster IP a port without a service is refused, and packets to an
 * unallocated one are dropped (kube-proxy.md 6.3).
 */
static __always_inline enum verdict selected_verdict(enum selected selected)
{
	switch (selected) {
	case SELECTED:
		return VERDICT_TRANSLATED;
	case NO_SUCH_PORT:
	case NO_ENDPOINT:
		return VERDICT_REFUSED;
	case NOT_ALLOCATED:
		return VERDICT_UNALLOCATED;
	case NO_LOCAL_ENDPOINT:
		return VERDICT_NO_LOCAL_ENDPOINT;
	case PASSED_THROUGH:
		return VERDICT_PASSED_THROUGH;
	case SOURCE_DENIED:
		return VERDICT_SOURCE_DENIED;
	case AT_SOCKET:
		return VERDICT_TRANSLATED_AT_SOCKET;
	case SELECT_RECYCLED:
		return VERDICT_RECYCLED;
	default:
		return VERDICT_PASSED;
	}
}

#endif
