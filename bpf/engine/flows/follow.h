/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Whether a packet belongs to the flow found by its tuple, and how it is rewritten: DNAT, un-DNAT,
 * SNAT or un-SNAT, by the entry's kind.
 */
#ifndef EBPFLB_ENGINE_FLOWS_FOLLOW_H
#define EBPFLB_ENGINE_FLOWS_FOLLOW_H

#include "engine/flows/touch.h"
#include "rules/backend.h"
#include "rules/frontend.h"

#define REPLY_TIMEOUT 3000000000ULL	/* ns; a SYN is sent again after 1 s and after 3 s (RFC 6298) */

/*
 * Whether a packet that opens a connection may replace this flow: both sides have closed, or one has
 * reset; or only packets that open a connection have passed, and the flow is older than
 * REPLY_TIMEOUT. While one side may still send, it is the backend that judges, as with conntrack
 * (a SYN in FIN_WAIT and CLOSE_WAIT is ignored: tcp_conntracks in nf_conntrack_proto_tcp.c).
 */
static __always_inline bool flow_may_be_replaced(const struct tuple *request_tuple,
						 const struct flow *request_entry)
{
	struct tuple translated = flow_translate(request_tuple, request_entry);
	struct flow *reply_entry = flow_opposite(&translated);
	__u32 reply_flags = reply_entry ? reply_entry->flags : FLOW_FIN;
	__u32 flags = request_entry->flags | reply_flags;

	return flow_has_ended(request_entry->flags, reply_flags) ||
	       (!(flags & FLOW_SEEN) && clock_coarse() > request_entry->created + REPLY_TIMEOUT);
}

/*
 * Whether a UDP flow's frontend still is its service's, or nobody's. It is looked up only after
 * frontends got other services, and once in a new flow, which may have been opened meanwhile.
 */
static __always_inline bool flow_has_frontend(const struct tuple *request_tuple,
					      const struct flow *known, struct flow *flow)
{
	struct settings *settings = settings_read();
	struct frontend frontend = tuple_frontend(request_tuple);
	__u32 moves = settings->frontend_moves;
	struct service service ALIGNED;

	if (known->frontend_moves == moves)
		return true;
	barrier();	/* the agent writes the services before it adds to the moves */
	if (service_find(&frontend, NO_NETNS, &service, NULL) != FOUND)
		return true;
	if (service.id != known->service)
		return false;
	if (flow_remains(flow, known))
		flow->frontend_moves = moves;
	return true;
}

/*
 * A packet that opens a connection belongs to a new flow if the old one may be replaced, or if the
 * service no longer has the flow's backend. UDP datagrams keep their flow as long as the service
 * has the backend, even a terminating one (kube-proxy.md 11.1), and no other service has the
 * frontend. A direct connection has no service.
 */
static __always_inline bool flow_continues(const struct packet *packet, const struct flow *known,
					   struct flow *flow)
{
	struct backend backend ALIGNED;

	if (!(known->flags & FLOW_REQUEST) || !packet->opens)
		return true;
	if (packet->tuple.protocol != UDP && flow_may_be_replaced(&packet->tuple, known))
		return false;
	if (packet->tuple.protocol == UDP && !flow_has_frontend(&packet->tuple, known, flow))
		return false;
	return known->kind == FLOW_DIRECT ||
	       backend_find(known->service, known->backend, &backend);
}

static __always_inline struct tuple flow_follow(const struct packet *packet,
						const struct flow *known, struct flow *flow)
{
	struct tuple to = flow_translate(&packet->tuple, known);

	flow_touch(known, flow, packet, &to);
	return to;
}

#endif
