/* SPDX-License-Identifier: GPL-2.0 */
/*
 * bind() to a NodePort in the node's own namespace fails, unless the operator switched that off:
 * traffic from outside goes to the service, and the process would never see it.
 */
#ifndef EBPFLB_SOCKETS_BIND_H
#define EBPFLB_SOCKETS_BIND_H

#include "core/counters.h"
#include "rules/frontend.h"
#include "sockets/reject.h"

static __always_inline bool bind_is_guarded(__u64 netns)
{
	return settings_read()->flags & SETTING_GUARD_NODEPORTS && netns_is_host(netns);
}

static __always_inline bool frontend_exists(const struct frontend *frontend)
{
	return LOOKUP(struct service, services, frontend) != NULL;
}

/* A NodePort has one number in both families. */
static __always_inline bool bind_is_to_nodeport(const struct frontend *local, bool takes_v4)
{
	struct frontend nodeport = nodeport_of(local);
	bool exists = frontend_exists(&nodeport);

	nodeport.address = address_from_v4(0);
	return exists || (takes_v4 && address_is_any(&local->address) && frontend_exists(&nodeport));
}

/* takes_v4: of a socket of IPv6 that is bound to :: */
static __always_inline enum answer bind_answer(const struct frontend *local, __u64 netns,
					       bool takes_v4)
{
	if (!bind_is_guarded(netns) || !bind_is_to_nodeport(local, takes_v4))
		return LEAVE;
	if (!address_is_any(&local->address) && !node_serves(&local->address, netns))
		return LEAVE;
	if (!NAMES_ERRNO) /* EPERM would not tell why, so it is allowed */
		return LEAVE;
	verdict_count(VERDICT_NODEPORT_BIND_DENIED);
	return is_shadow() ? LEAVE : reject_bind();
}

#endif
