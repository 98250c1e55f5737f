/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The hooks at every device (tc: tcx or clsact). With the engine netfilter, the default:
 *
 *   ingress  before the stack: chooses a backend for a request to a frontend, and writes its id to
 *            skb->priority, by which the kernel's NAT translates (engine/netfilter/choose.h)
 *   egress   after the stack, is not attached unless the flow tables may have flows, or answers are
 *            noted (path/attempt.h)
 *
 * With the engine flows (engine/flows) our own tables translate, at the device:
 *
 *   ingress  DNAT of requests to a frontend, un-SNAT of replies to a masqueraded flow
 *   egress   un-DNAT of replies to a client, SNAT of requests whose replies must come back to this
 *            node; refuses what the node itself sends to a service without backend
 *
 * Between the hooks the stack then sees client and backend talk to each other, in both directions,
 * and routes, filters and tracks their packets as any others.
 */
#include "compat.h"
#include "core/note.h"
#include "core/scratch.h"
#include "maps.h"
#include "net/rewrite.h"
#include "path/attempt.h"
#include "path/egress.h"
#include "path/icmp_error.h"
#include "path/ingress.h"
#include "path/parse.h"
#include "path/reject_packet.h"
#include "path/repeated.h"
#include "path/vip.h"
#include "record/event_packet.h"

/* The packet gets its new tuple, if the outcome is so; later fragments follow the first one. */
static __always_inline void packet_translate(struct __sk_buff *ctx, const struct packet *packet,
					     const struct tuple *to, bool translated)
{
	if (packet->piece == FIRST)
		fragment_remember(packet, translated);
	if (translated)
		packet_rewrite(ctx, packet, to);
}

/* --packet-mark: by it rules of netfilter recognize what was translated before they see it. */
static __always_inline void packet_mark(struct __sk_buff *ctx)
{
	struct settings *settings = settings_read();

	if (settings->mark_mask)
		ctx->mark = (ctx->mark & ~settings->mark_mask) | settings->mark;
}

/*
 * The packet was turned into the reset of one that was to leave by this device, where it had come
 * in. Its link header still leads to the next hop of that one; the reset needs its own.
 */
static __always_inline int reset_leave(struct __sk_buff *ctx)
{
#ifdef NO_LINK_HEADER
	return GO_ON;
#else
	return redirect_neigh(ctx->ifindex, NULL, 0, 0);
#endif
}

static __always_inline struct outcome ingress_read(struct __sk_buff *ctx, struct packet *packet,
						   struct onward *onward, struct opening *opening)
{
	struct outcome outcome = ingress_packet(ctx, packet, onward, opening);

	FORGET_VALUE(outcome.verdict, ctx->len);
	FORGET_VALUE(outcome.rewrite, ctx->len);
	packet_translate(ctx, packet, &onward->to, outcome.rewrite);
	return outcome;
}

static __always_inline struct outcome ingress_icmp(struct __sk_buff *ctx, struct scratch *scratch)
{
	struct packet *packet = &scratch->packet;
	struct onward *onward = &scratch->onward;
	struct outcome outcome;

	onward->is_ping = false;
	if (!packet_is_echo(ctx, packet))
		return icmp_error_translate(ctx, packet, onward, &scratch->related, HOOK_INGRESS);
	outcome = unchanged(ping_verdict(ctx, packet, &scratch->opening.selection.service));
	onward->is_ping = outcome.verdict == VERDICT_PING_ANSWERED;
	return outcome;
}

static __always_inline struct outcome ingress_outcome(struct __sk_buff *ctx,
						      struct scratch *scratch)
{
	struct packet *packet = &scratch->packet;
	enum reading reading = ingress_parse(ctx, packet);

	if (reading == READ)
		return ingress_read(ctx, packet, &scratch->onward, &scratch->opening);
	if (reading == READ_ICMP)
		return ingress_icmp(ctx, scratch);
	return not_read(reading);
}

PROGRAM("tc/ingress")
int ingress(struct __sk_buff *ctx)
{
	struct scratch *scratch;
	struct outcome outcome;
	enum action action;

	monitor_begin(begun);
	if (port_has_chosen(ctx))
		return GO_ON;
	translated_begin(ctx);
	if (packet_is_repeated(ctx))
		return GO_ON;
	scratch = scratch_begin(HOOK_INGRESS);
	if (!scratch)
		return GO_ON;
	struct packet *packet = &scratch->packet;
	struct onward *onward = &scratch->onward;

	monitor_packet_begin(scratch);
	outcome = ingress_outcome(ctx, scratch);
	if (outcome.rewrite)
		packet_mark(ctx);
	verdict_count(monitor_packet(ctx, scratch, EVENT_INGRESS, begun, outcome.verdict));
	if (onward->device)
		return translated_leave(ctx, packet, onward->device);
	action = action_in_force(outcome.verdict);
	if (action != REJECT)
		return action;
	if (!reply_packet(ctx, packet, packet_is_icmp(packet) && onward->is_ping,
			  onward->mtu))
		return action_of(verdict_count(monitor_packet(ctx, scratch, EVENT_INGRESS, begun,
							      VERDICT_REJECT_LIMITED)));
	swap_link(ctx);
	return bpf_redirect(ctx->ifindex, 0);
}

static __always_inline struct outcome egress_read(struct __sk_buff *ctx, struct packet *packet,
						  struct onward *onward, struct opening *opening)
{
	struct outcome outcome = egress_packet(ctx, packet, onward, opening);

	if (outcome.rewrite && attempt_ends(packet->control) && attempts_are_noted())
		attempt_end(&onward->to, packet->control);
	packet_translate(ctx, packet, &onward->to, outcome.rewrite);
	return outcome;
}

PROGRAM("tc/egress")
int egress(struct __sk_buff *ctx)
{
	struct outcome outcome;
	enum reading reading;
	enum action action;

	monitor_begin(begun);
	attempt_answer(ctx);
	if (is_translated(ctx) || egress_has_nothing_to_do())
		return GO_ON;
	struct scratch *scratch = scratch_begin(HOOK_EGRESS);
	if (!scratch)
		return GO_ON;
	struct packet *packet = &scratch->packet;
	struct onward *onward = &scratch->onward;

	monitor_packet_begin(scratch);
	reading = packet_parse(ctx, packet);
	if (reading == READ)
		outcome = egress_read(ctx, packet, onward, &scratch->opening);
	else if (reading == READ_ICMP)
		outcome = icmp_error_translate(ctx, packet, onward, &scratch->related, HOOK_EGRESS);
	else
		outcome = not_read(reading);
	verdict_count(monitor_packet(ctx, scratch, EVENT_EGRESS, begun, outcome.verdict));
	action = action_in_force(outcome.verdict);
	if (action != REJECT)
		return action;
	if (!reply_packet(ctx, packet, false, 0))
		return action_of(verdict_count(monitor_packet(ctx, scratch, EVENT_EGRESS, begun,
							      VERDICT_REJECT_LIMITED)));
	if (ctx->ingress_ifindex)
		return reset_leave(ctx);
	/* One of the node's own is now the reply to it, and comes in as if from where it was sent. */
	swap_link(ctx);
	return bpf_redirect(ctx->ifindex, BPF_F_INGRESS);
}

LICENSE("GPL")
