/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Whether a TCP segment belongs to its connection, by its sequence numbers, or an SCTP packet to
 * its association, by its tag: only such packets may end it. An attacker who knows only the
 * addresses and ports has to guess the numbers.
 *
 * The entry of each side has three numbers: the end of the data that this side has sent, the last
 * number that it has acknowledged, and the number of its last SYN. conntrack also tracks the window
 * of each side; this code uses a fixed distance that no window exceeds by default. An unknown
 * number allows every segment. docs/architecture.md says what would break without this check.
 */
#ifndef EBPFLB_ENGINE_FLOWS_WINDOW_H
#define EBPFLB_ENGINE_FLOWS_WINDOW_H

#include "engine/flows/table.h"

#define NEAR 4194304	/* bytes: Linux's largest send buffer (net.ipv4.tcp_wmem) */
#define UNSCALED 65536	/* bytes: more than any window before the handshake is over */

/* Whether a number is `least`, or less than `distance` bytes after it. */
static __always_inline bool is_after(__u32 number, __u32 least, __u32 distance)
{
	return number - least < distance;
}

/* 0 stands for an unknown number. A number that is 0 counts as 1, also where it is compared. */
static __always_inline __u32 never_zero(__u32 number)
{
	return number ? number : 1;
}

static __always_inline void window_note_syn(struct flow *flow, const struct packet *packet)
{
	flow->asked = never_zero(packet->sequence + 1);
}

/* Sets the numbers of a side from its first segment. */
static __always_inline void window_begin(struct flow *flow, const struct packet *packet)
{
	flow->end = never_zero(packet->sequence + packet->bytes);
	flow->acknowledged = packet->control & TCP_ACK ? never_zero(packet->acknowledgment) : 0;
	flow->asked = 0;
}

/* Updates the numbers from a segment that is in the window. */
static __always_inline void window_advance(struct flow *flow, const struct packet *packet)
{
	__u32 end = packet->sequence + packet->bytes;

	if (flow->asked)
		flow->asked = 0;
	if (!flow->end || is_after(end, flow->end + 1, NEAR))
		flow->end = never_zero(end);
	if (packet->control & TCP_ACK &&
	    (!flow->acknowledged || is_after(packet->acknowledgment, flow->acknowledged + 1, NEAR)))
		flow->acknowledged = never_zero(packet->acknowledgment);
}

/* Whether a segment begins near its side's end, and acknowledges what the other side sent. */
static __always_inline bool window_has(const struct flow *flow, const struct flow *opposite,
				       const struct packet *packet)
{
	if (!is_after(packet->sequence, flow->end - NEAR, 2 * NEAR))
		return false;
	return !opposite->end || (packet->control & TCP_ACK &&
				  is_after(opposite->end, packet->acknowledgment, NEAR));
}

/* Whether a segment acknowledges the SYN of the side that has this entry. */
static __always_inline bool window_acknowledges(const struct flow *sent,
						const struct packet *packet)
{
	return packet->control & TCP_ACK &&
	       (!sent->end || is_after(sent->end, packet->acknowledgment, UNSCALED));
}

/*
 * Whether a backend answers the last SYN of its client. That SYN may belong to a later connection
 * from the same port, if the backend no longer knows the former connection.
 */
static __always_inline bool window_answers_syn(const struct flow *request_entry,
					       const struct packet *packet)
{
	return packet->control & TCP_ACK && request_entry->asked &&
	       is_after(packet->acknowledgment, request_entry->asked, UNSCALED);
}

/* Whether a client's segment belongs to a later connection, whose SYN the backend has answered. */
static __always_inline bool window_begins_anew(const struct flow *flow, const struct packet *packet,
					       const struct tuple *translated)
{
	struct flow *reply_entry;

	if (!flow->asked || never_zero(packet->sequence) != flow->asked ||
	    !(flow->flags & FLOW_REQUEST))
		return false;
	reply_entry = flow_opposite(translated);
	return reply_entry && reply_entry->acknowledged == flow->asked;
}

/*
 * Whether a reset counts: its receiver would accept it (RFC 5961 3.2), since it has the number that
 * the receiver expects. This number lies between the last acknowledged number and the end of the
 * sent data. For a reset with another number in the window the receiver asks again, and the answer
 * has the right number. A backend that refuses a SYN has no number of its own.
 */
static __always_inline bool window_has_reset(const struct flow *flow, const struct flow *opposite,
					     const struct packet *packet)
{
	__u32 least = opposite->acknowledged ? opposite->acknowledged : flow->end;

	if (flow->end && is_after(never_zero(packet->sequence), least, flow->end - least + 1))
		return true;
	return flow->flags & FLOW_REQUEST ? !flow->end : window_answers_syn(opposite, packet);
}

/*
 * Follows the numbers of a segment without SYN, and returns whether the segment may be trusted. If
 * it begins where its side ended, the other side's entry is not looked up.
 */
static __always_inline bool window_follow(struct flow *flow, const struct packet *packet,
					  const struct tuple *translated)
{
	bool resets = packet->ends & FLOW_RST;
	struct flow *opposite;

	if (packet->sequence != flow->end || !flow->end) {
		opposite = flow_opposite(translated);
		if (resets)
			return !opposite || window_has_reset(flow, opposite, packet);
		if (opposite && flow->end && !window_has(flow, opposite, packet))
			return false;
	}
	if (!resets)
		window_advance(flow, packet);
	return true;
}

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
