/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Whether a packet belongs to the flow found by its tuple, and how it is rewritten: DNAT, un-DNAT,
 * SNAT or un-SNAT, by the entry's kind.
 */
#ifndef EBPFLB_ENGINE_FLOWS_FOLLOW_H
#define EBPFLB_ENGINE_FLOWS_FOLLOW_H

#include "path/affinity.h"
#include "path/backend.h"
#include "path/frontend.h"
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
	struct flow *reply_entry = flow_opposite(&translated);
	__u32 flags = request_entry->flags | (reply_entry ? reply_entry->flags : 0);

	return flags & (FLOW_FIN | FLOW_RST) ||
	       (!(flags & FLOW_SEEN) && clock_coarse() > request_entry->created + REPLY_TIMEOUT);
}

/*
 * Whether a UDP flow's frontend still is its service's, or nobody's. It is looked up only after
 * frontends got other services, and once in a new flow, which may have been opened meanwhile.
 */
static __always_inline bool flow_has_frontend(const struct tuple *request_tuple, struct flow *flow)
{
	struct settings *settings = settings_read();
	struct frontend frontend = tuple_frontend(request_tuple);
	__u32 moves = settings ? settings->frontend_moves : 0;
	__u32 service;

	if (flow->frontend_moves == moves)
		return true;
	barrier();	/* the agent writes the services before it adds to the moves */
	service = service_id_at(&frontend);
	if (service && service != flow->service)
		return false;
	if (service)
		flow->frontend_moves = moves;
	return true;
}

/*
 * A packet that opens a connection belongs to a new flow if the old one may be replaced, or if the
 * service no longer has the flow's backend. UDP datagrams keep their flow as long as the service
 * has the backend, even a terminating one (kube-proxy.md 11.1), and no other service has the
 * frontend. A direct connection has no service.
 */
static __always_inline bool flow_continues(const struct packet *packet, struct flow *flow)
{
	struct backend backend;

	if (!(flow->flags & FLOW_REQUEST) || !packet->opens)
		return true;
	if (packet->tuple.protocol != UDP && flow_may_be_replaced(&packet->tuple, flow))
		return false;
	if (packet->tuple.protocol == UDP && !flow_has_frontend(&packet->tuple, flow))
		return false;
	return flow->kind == FLOW_DIRECT || backend_find(flow->service, flow->backend, &backend);
}

/*
 * Whether a packet shows that its sender gets the packets of the other end. One that opens a
 * connection does not: its source may be forged. So may that of a client's further packets, as long
 * as the backend has not replied. Any reply shows that the backend got the request.
 */
static __always_inline bool flow_is_answered(const struct flow *flow, const struct packet *packet,
					     const struct tuple *translated)
{
	struct flow *reply_entry;

	if (packet->tuple.protocol == UDP)
		return true;
	if (packet->opens)
		return false;
	if (!(flow->flags & FLOW_REQUEST))
		return true;
	if (packet->ends & FLOW_RST)
		return false;
	reply_entry = flow_opposite(translated);
	return reply_entry && reply_entry->flags & FLOW_SEEN;
}

/* An end of a flow has been answered: the client's address is not forged. */
static __always_inline void flow_confirm_affinity(const struct flow *flow,
						  const struct tuple *packet,
						  const struct tuple *translated)
{
	const struct address *client = flow->flags & FLOW_REQUEST ? &packet->source
								  : &translated->destination;

	affinity_confirm(client, flow->service, flow->backend, flow->created);
}

/*
 * Notes that a packet has passed. A reset may be forged: if more packets of that side follow,
 * FLOW_RST is cleared.
 */
static __always_inline void flow_touch(struct flow *flow, const struct packet *packet,
				       const struct tuple *translated)
{
	__u64 now = clock_coarse();
	bool opens = packet->opens && packet->tuple.protocol != UDP;
	__u32 before = opens || packet->ends ? flow->flags : flow->flags & ~FLOW_RST;
	__u32 flags = before | packet->ends;

	if (!(flags & FLOW_SEEN) && flow_is_answered(flow, packet, translated)) {
		flags |= FLOW_SEEN;
		if (flags & FLOW_AFFINITY)
			flow_confirm_affinity(flow, &packet->tuple, translated);
		flags &= ~FLOW_AFFINITY;
	}
	if (flow->flags != flags)
		flow->flags = flags;
	if (flow->last_seen != now)
		flow->last_seen = now;
}

static __always_inline struct tuple flow_follow(const struct packet *packet, struct flow *flow)
{
	struct tuple to = flow_translate(&packet->tuple, flow);

	flow_touch(flow, packet, &to);
	return to;
}

#endif
