/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Whether an SCTP packet belongs to its association, by the rules of conntrack (sctp_packet in
 * nf_conntrack_proto_sctp.c): each side chooses a tag, by INIT or INIT ACK, and the other side's
 * packets carry it (RFC 9260 8.5). An attacker who cannot see an association's packets has to guess
 * the tag. An unknown tag allows every packet.
 *
 * The tags of an established association stay, because an INIT may be forged. If a restarted client
 * opens an association from the same port, its end is not noticed, so its flow stays until its
 * timeout.
 */
#ifndef EBPFLB_ENGINE_FLOWS_ASSOCIATION_H
#define EBPFLB_ENGINE_FLOWS_ASSOCIATION_H

#include "engine/flows/window.h"

/* Notes the first numbers of a side from its SYN, or its tag from its INIT. */
static __always_inline void side_begin(struct flow *flow, const struct packet *packet)
{
	if (packet->control & TCP_SYN) {
		window_begin(flow, packet);
		window_note_syn(flow, packet);
	} else if (packet->initiate_tag) {
		flow->end = packet->initiate_tag;
	}
}

/* Whether the packet has its receiver's tag, or the tag of a sender that knows no association. */
static __always_inline bool association_has(const struct flow *flow, const struct flow *opposite,
					    const struct packet *packet)
{
	__u32 tag = packet->reflected && packet->ends & FLOW_RST ? flow->end : opposite->end;

	return !tag || packet->tag == tag;
}

/* Notes the tag that a side chooses, and returns whether the packet may be trusted. */
static __always_inline bool association_follow(struct flow *flow, const struct packet *packet,
					       const struct tuple *translated)
{
	struct flow *opposite = flow_opposite(translated);
	bool is_client = flow->flags & FLOW_REQUEST, is_believed;

	if (!opposite)
		return true;
	is_believed = association_has(flow, opposite, packet);
	/* An INIT carries no tag yet; an INIT ACK carries the client's tag. */
	if (packet->initiate_tag && (is_client || is_believed) &&
	    !((is_client ? flow : opposite)->flags & FLOW_SEEN))
		flow->end = packet->initiate_tag;
	return is_believed;
}

#endif
