/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Which segments lie in the window of their TCP connection, as conntrack has it (tcp_in_window in
 * nf_conntrack_proto_tcp.c). An entry has the numbers of its own side: the end of what that has
 * sent, what it has acknowledged, and up to where it lets the other side send. Only a segment that
 * lies in the window changes them, so who cannot see a connection's packets has to guess.
 *
 * A segment that begins where its side ended needs no look-up of the other side's entry. Numbers
 * that are not known forbid nothing.
 */
#ifndef EBPFLB_ENGINE_FLOWS_WINDOW_H
#define EBPFLB_ENGINE_FLOWS_WINDOW_H

#include "engine/flows/table.h"
#include "net/scale.h"

#define WINDOW_LEAST 66000	/* bytes; conntrack's MAXACKWINCONST: how late a segment may come */

static __always_inline bool is_after(__u32 number, __u32 other)
{
	return (__s32)(number - other) > 0;
}

/* 0 stands for a number that is not known; 1 instead is near enough. */
static __always_inline __u32 known(__u32 number)
{
	return number ? number : 1;
}

/* Whether a number is `least` or a little later. */
static __always_inline bool is_just_after(__u32 number, __u32 least)
{
	return number - least < WINDOW_LEAST;
}

/* The first numbers of a side, from its SYN: the window in there is not scaled. */
static __always_inline void window_begin(struct __sk_buff *ctx, struct flow *flow,
					 const struct packet *packet)
{
	flow->scale = window_scale(ctx, packet);
	flow->end = known(packet->sequence + packet->bytes);
	flow->acknowledged = packet->acknowledgment;
	flow->edge = packet->control & TCP_ACK ? known(packet->acknowledgment + packet->window) : 0;
}

/* Takes the numbers of a segment that is in the window. */
static __always_inline void window_advance(struct flow *flow, const struct packet *packet)
{
	__u32 end = packet->sequence + packet->bytes;
	__u32 edge = packet->acknowledgment + ((__u32)packet->window << (flow->scale & 15));

	if (flow->asked)
		flow->asked = 0;
	if (is_after(end, flow->end) || !flow->end)
		flow->end = known(end);
	if (!(packet->control & TCP_ACK))
		return;
	if (is_after(packet->acknowledgment, flow->acknowledged) || !flow->edge)
		flow->acknowledged = packet->acknowledgment;
	if (is_after(edge, flow->edge) || !flow->edge)
		flow->edge = known(edge);
}

static __always_inline __u32 window_size(const struct flow *flow)
{
	__u32 size = flow->edge - flow->acknowledged;

	return size > WINDOW_LEAST ? size : WINDOW_LEAST;
}

/* conntrack's four conditions, as far as the other side's numbers are known. */
static __always_inline bool window_has(const struct flow *flow, const struct flow *opposite,
				       const struct packet *packet)
{
	__u32 end = packet->sequence + packet->bytes;

	if (opposite->edge && (is_after(packet->sequence, opposite->edge) ||
			       is_after(flow->end - window_size(opposite), end)))
		return false;
	if (!opposite->end || !(packet->control & TCP_ACK))
		return !opposite->end;
	return !is_after(packet->acknowledgment, opposite->end) &&
	       !is_after(opposite->end - window_size(flow), packet->acknowledgment);
}

/* Whether a segment acknowledges what the side has sent that has this entry. */
static __always_inline bool window_acknowledges(const struct flow *sent,
						const struct packet *packet)
{
	if (!(packet->control & TCP_ACK))
		return false;
	return !sent->end || is_just_after(sent->end, packet->acknowledgment);
}

/*
 * Whether a backend's reset says that it does not take the SYN: one that it has not answered, or
 * one of a later connection from the same port, which the backend does not know any more.
 */
static __always_inline bool window_refuses(const struct flow *reply_entry,
					   const struct flow *request_entry,
					   const struct packet *packet)
{
	if (!reply_entry->end || !(request_entry->flags & FLOW_SEEN))
		return window_acknowledges(request_entry, packet);
	return packet->control & TCP_ACK && request_entry->asked &&
	       is_just_after(packet->acknowledgment, request_entry->asked);
}

/*
 * A reset counts if its receiver would believe it (RFC 5961 3.2): it has the number that is awaited,
 * which lies between what was last acknowledged and the end of what was sent. Of one with another
 * number in the window the receiver asks again, and the answer to that has the right number.
 */
static __always_inline bool window_has_reset(const struct flow *flow, const struct flow *opposite,
					     const struct packet *packet)
{
	bool is_known = flow->end || opposite->edge;
	__u32 least = opposite->edge ? opposite->acknowledged : flow->end - WINDOW_LEAST;
	__u32 most = flow->end && is_after(flow->end, least) ? flow->end : least;

	if (is_known && packet->sequence - least <= most - least)
		return true;
	return flow->flags & FLOW_REQUEST ? !is_known : window_refuses(flow, opposite, packet);
}

/* Follows the numbers of a segment without SYN; whether what it says is to be believed. */
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

#endif
