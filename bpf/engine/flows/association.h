/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Which SCTP packets belong to their association, as conntrack has it (sctp_packet in
 * nf_conntrack_proto_sctp.c): each side chooses a tag, by INIT or INIT ACK, and the other side's
 * packets carry it (RFC 9260 8.5). Who cannot see an association's packets has to guess it. A tag
 * that is not known forbids nothing.
 *
 * An INIT in an established association may be forged. Its tag, and that of the backend's INIT ACK,
 * count when the client's COOKIE ECHO shows that it got that.
 */
#ifndef EBPFLB_ENGINE_FLOWS_ASSOCIATION_H
#define EBPFLB_ENGINE_FLOWS_ASSOCIATION_H

#include "core/settings.h"
#include "engine/flows/window.h"

/* The first numbers of a side, from its SYN; or its tag, from its INIT. */
static __always_inline void side_begin(struct __sk_buff *ctx, struct flow *flow,
				       const struct packet *packet)
{
	if (packet->control & TCP_SYN)
		window_begin(ctx, flow, packet);
	else if (packet->chosen)
		flow->end = packet->chosen;
}

/* Whether the packet has the tag of its receiver; or of its sender, who knows of no association. */
static __always_inline bool association_has(const struct flow *flow, const struct flow *opposite,
					    const struct packet *packet)
{
	__u32 tag = packet->reflected && packet->ends & FLOW_RST ? flow->end : opposite->end;

	return !tag || packet->tag == tag;
}

/* The tag that a side asks for. INIT ACK has the tag of the client that it answers. */
static __always_inline void association_ask(struct flow *flow, struct flow *opposite,
					    const struct packet *packet)
{
	bool is_client = flow->flags & FLOW_REQUEST;
	__u32 seen = (is_client ? flow->flags : opposite->flags) & FLOW_SEEN;

	if (!is_client && opposite->end && packet->tag != opposite->end &&
	    (!opposite->asked || packet->tag != opposite->asked))
		return;
	if (seen)
		flow->asked = packet->chosen;
	else
		flow->end = packet->chosen;
}

/* A client that sends the tag which the backend asked for has got the backend's INIT ACK. */
static __always_inline bool association_begins_anew(const struct flow *flow,
						    const struct flow *opposite,
						    const struct packet *packet)
{
	return packet->chunk == SCTP_COOKIE_ECHO && flow->flags & FLOW_REQUEST && flow->asked &&
	       opposite->asked && packet->tag == opposite->asked;
}

static __always_inline void association_begin_anew(struct flow *flow, struct flow *opposite)
{
	flow->end = flow->asked;
	flow->asked = 0;
	opposite->end = opposite->asked;
	opposite->asked = 0;
	opposite->flags &= ~FLOW_FIN;
}

/* Follows the tags of a packet; the flags that its side's entry has then. */
static __always_inline __u32 association_follow(struct flow *flow, const struct packet *packet,
						const struct tuple *translated, __u32 flags)
{
	struct tuple opposite_tuple = tuple_opposite(translated);
	struct flow *opposite = flow_find(&opposite_tuple);
	struct scratch *scratch = scratch_here();

	if (!opposite || !scratch || !flow_copy(&scratch->other, &opposite_tuple, opposite))
		return flags | packet->ends;
	if (packet->chosen)
		association_ask(flow, opposite, packet);
	if (association_begins_anew(flow, opposite, packet) &&
	    flow_remains(opposite, &scratch->other)) {
		association_begin_anew(flow, opposite);
		return flags & ~FLOW_FIN;
	}
	return association_has(flow, opposite, packet) ? flags | packet->ends : flags;
}

#endif
