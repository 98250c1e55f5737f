/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Whether a packet belongs to the flow found by its tuple, and how it is rewritten: DNAT, un-DNAT,
 * SNAT or un-SNAT, by the entry's kind.
 */
#ifndef EBPFLB_ENGINE_FLOWS_FOLLOW_H
#define EBPFLB_ENGINE_FLOWS_FOLLOW_H

#include "path/backend.h"
#include "engine/flows/table.h"

#define REPLY_TIMEOUT 3000000000ULL	/* ns; a SYN is sent again after 1 s and after 3 s (RFC 6298) */

/*
 * Whether a packet that opens a connection may replace this flow: one side has closed or reset, or
 * only packets that open a connection have passed, and the flow is older than REPLY_TIMEOUT.
 */
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
 * A packet that opens a connection belongs to a new flow if the old one may be replaced, or if the
 * service no longer has the flow's backend. UDP datagrams keep their flow as long as the service
 * has the backend, even a terminating one (kube-proxy.md 11.1). A direct connection has no service.
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
