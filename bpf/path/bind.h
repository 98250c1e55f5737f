/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A process that binds a NodePort on the node would never see outside traffic: NodePorts win.
 * So the bind fails, in the node's own namespace, unless the operator switched the guard off.
 */
#ifndef EBPFLB_PATH_BIND_H
#define EBPFLB_PATH_BIND_H

#include "path/reject.h"
#include "path/service.h"
#include "path/verdict.h"

static __always_inline bool bind_is_guarded(__u64 netns)
{
	struct settings *settings = settings_read();

	return settings && (settings->flags & SETTING_GUARD_NODEPORTS) && netns_is_host(netns);
}

/* A socket bound to :: takes IPv4 too, and a NodePort has one number in both families. */
static __always_inline bool bind_hits_nodeport(const struct frontend *local)
{
	struct address v4 = address_from_v4(0);
	struct frontend other = { .address = v4, .port = local->port, .protocol = local->protocol };

	if (nodeport_lookup(local))
		return true;
	return address_is_any(&local->address) && nodeport_lookup(&other);
}

static __always_inline enum answer bind_answer(const struct frontend *local, __u64 netns)
{
	if (!bind_is_guarded(netns) || !bind_hits_nodeport(local))
		return LEAVE;
	if (!address_is_any(&local->address) && !node_serves(&local->address, netns))
		return LEAVE;
	if (reject_bind() == LEAVE)
		return LEAVE;
	verdict_count(VERDICT_PORT_TAKEN);
	return DENY;
}

#endif
