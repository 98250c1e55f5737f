/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A process that binds a NodePort on the node would never see outside traffic: NodePorts win.
 * So the bind fails, in the node's own namespace, unless the operator switched the guard off.
 */
#ifndef EBPFLB_PATH_BIND_H
#define EBPFLB_PATH_BIND_H

#include "path/reject_socket.h"
#include "path/frontend.h"
#include "path/verdict.h"

static __always_inline bool bind_is_guarded(__u64 netns)
{
	struct settings *settings = settings_read();

	return settings && (settings->flags & SETTING_GUARD_NODEPORTS) && netns_is_host(netns);
}

static __always_inline bool bind_is_nodeport(const struct frontend *nodeport)
{
	return LOOKUP(struct service, services, nodeport) != NULL;
}

/* A socket bound to :: takes IPv4 too, and a NodePort has one number in both families. */
static __always_inline bool bind_hits_nodeport(const struct frontend *local)
{
	struct frontend nodeport = nodeport_of(local);
	bool hit = bind_is_nodeport(&nodeport);

	nodeport.address = address_from_v4(0);
	return hit || (address_is_any(&local->address) && bind_is_nodeport(&nodeport));
}

static __always_inline enum answer bind_answer(const struct frontend *local, __u64 netns)
{
	if (!bind_is_guarded(netns) || !bind_hits_nodeport(local))
		return LEAVE;
	if (!address_is_any(&local->address) && !node_serves(&local->address, netns))
		return LEAVE;
	if (reject_bind() == LEAVE)
		return LEAVE;
	verdict_count(VERDICT_NODEPORT_BIND_DENIED);
	return DENY;
}

#endif
