/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Whether a packet belongs to the flow found by its tuple, and how it is rewritten: DNAT, un-DNAT,
 * SNAT or un-SNAT, by the entry's kind.
 */
#ifndef EBPFLB_ENGINE_FLOWS_FOLLOW_H
#define EBPFLB_ENGINE_FLOWS_FOLLOW_H

#include "engine/flows/count.h"
#include "engine/flows/window.h"
#include "rules/affinity.h"
#include "rules/backend.h"
#include "rules/frontend.h"

/* The changes that a passing packet makes in the entry of its flow. */

/*
 * Whether a packet shows that its sender receives the other end's packets. A packet that opens a
 * connection does not: its source may be forged. The client's further packets may also be forged
 * until the backend has replied; in TCP they must acknowledge that reply, a SYN-ACK. A backend's
 * reply without SYN belongs to an old connection, or refuses. Any other reply shows that the
 * backend got the request.
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
		return !packet->control || packet->control & TCP_SYN;
	if (packet->ends & FLOW_RST)
		return false;
	reply_entry = flow_opposite(translated);
	if (!reply_entry || !(reply_entry->flags & FLOW_SEEN))
		return false;
	return packet->tuple.protocol == TCP ? window_acknowledges(reply_entry, packet)
					     : association_has(flow, reply_entry, packet);
}

/* Confirms the client's affinity after an answer to one end: the client's address is not forged. */
static __always_inline void flow_confirm_affinity(const struct flow *flow,
						  const struct tuple *packet,
						  const struct tuple *translated)
{
	const struct address *client = flow->flags & FLOW_REQUEST ? &packet->source
								  : &translated->destination;

	affinity_confirm(client, flow->service, flow->backend, flow->created);
}

/*
 * Whether a connection begins with this segment: the client's SYN, or the backend's SYN-ACK. In an
 * established connection either may be forged: the SYN's number is only kept for a backend that
 * answers it because it no longer knows the old connection.
 */
static __always_inline bool flow_begins(struct flow *flow, const struct packet *packet,
					const struct tuple *translated)
{
	struct flow *request_entry;

	if (flow->flags & FLOW_REQUEST)
		return !(flow->flags & FLOW_SEEN);
	request_entry = flow_opposite(translated);
	return request_entry && packet->control & TCP_ACK &&
	       (!(request_entry->flags & FLOW_SEEN) || window_answers_syn(request_entry, packet));
}

/* Returns an entry's flags after a segment, with FLOW_FIN or FLOW_RST if it ends its side. */
static __always_inline __u32 flow_follow_segment(struct flow *flow, const struct packet *packet,
						 const struct tuple *translated, __u32 flags)
{
	bool is_syn = packet->control & TCP_SYN;

	if (is_syn ? flow_begins(flow, packet, translated)
		   : window_begins_anew(flow, packet, translated)) {
		window_begin(flow, packet);
		flags &= ~FLOW_FIN;
	}
	if (is_syn) {
		window_note_syn(flow, packet);
		return flags;
	}
	return window_follow(flow, packet, translated) ? flags | packet->ends : flags;
}

/* Returns an entry's flags after a packet of any protocol. */
static __always_inline __u32 flow_ends(struct flow *flow, const struct packet *packet,
				       const struct tuple *translated, __u32 flags)
{
	if (packet->tuple.protocol == SCTP)
		return association_follow(flow, packet, translated) ? flags | packet->ends : flags;
	return packet->control ? flow_follow_segment(flow, packet, translated, flags) : flags;
}

_Static_assert(FLOW_FIN == FLOW_SEEN << 1, "one is computed from the other");

/*
 * Notes in an entry, of which `known` is a copy, that a packet has passed. A reset may be forged:
 * if more packets of that side follow, FLOW_RST is cleared. A FIN before the other side was
 * answered ends nothing: conntrack treats it as invalid (tcp_conntracks, sSS).
 */
static __always_inline void flow_touch(const struct flow *known, struct flow *flow,
				       const struct packet *packet,
				       const struct tuple *translated)
{
	__u64 now = clock_coarse();
	bool opens = packet->opens && packet->tuple.protocol != UDP;
	__u32 flags;

	if (!flow_remains(flow, known))
		return;
	flags = opens || packet->ends ? flow->flags : flow->flags & ~FLOW_RST;
	flags = flow_ends(flow, packet, translated, flags);
	if (!(flags & FLOW_SEEN) && flow_is_answered(flow, packet, translated)) {
		flags |= FLOW_SEEN;
		if (flags & FLOW_AFFINITY)
			flow_confirm_affinity(known, &packet->tuple, translated);
		flags &= ~FLOW_AFFINITY;
	}
	flags &= ~FLOW_FIN | (flags & FLOW_SEEN) << 1;
	if (!flow_remains(flow, known))
		return;
	if (flow->flags != flags)
		flow->flags = flags;
	if (flow->last_seen != now)
		flow->last_seen = now;
	if (known->connection)
		flow_follow_count(known, flags, translated);
}

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
