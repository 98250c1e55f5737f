/* SPDX-License-Identifier: GPL-2.0 */
/* Whether a packet goes on with the flow of its tuple, and what becomes of it then. */
#ifndef EBPFLB_PATH_FLOW_FOLLOW_H
#define EBPFLB_PATH_FLOW_FOLLOW_H

#include "path/backend.h"
#include "path/flow.h"

#define REPLY_TIMEOUT 3000000000ULL	/* ns; a SYN is sent again after 1 s and after 3 s (RFC 6298) */

/* A side has closed or reset; or no reply has passed for so long that none is to be expected. */
static __always_inline bool flow_may_be_replaced(const struct tuple *request_tuple,
					 const struct flow *request_entry)
{
	struct tuple translated = flow_translate(request_tuple, request_entry);
	struct tuple reply_tuple = tuple_reverse(&translated, HOOK_EGRESS);
	struct flow *reply_entry = flow_find(&reply_tuple);
	__u32 flags = request_entry->flags | (reply_entry ? reply_entry->flags : 0);

	return flags & (FLOW_FIN | FLOW_RST) ||
	       (!(flags & FLOW_SEEN) && clock_coarse() > request_entry->created + REPLY_TIMEOUT);
}

/*
 * A packet that opens a connection belongs to a new flow where the old one is over, or where its
 * backend no longer serves. Datagrams of UDP keep their flow while its backend serves, even if it
 * only terminates (kube-proxy.md 11.1). A direct connection has no service.
 */
static __always_inline bool flow_continues(const struct packet *packet, const struct flow *flow)
{
	struct backend backend;

	if (!(flow->flags & FLOW_REQUEST) || !packet->opens)
		return true;
	if (packet->tuple.protocol != UDP && flow_may_be_replaced(&packet->tuple, flow))
		return false;
	return flow->kind == FLOW_DIRECT || backend_find(flow->service, flow->backend, &backend);
}

static __always_inline struct tuple flow_follow(const struct packet *packet, struct flow *flow)
{
	flow_touch(flow, packet);
	return flow_translate(&packet->tuple, flow);
}

#endif
