/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Handles an ICMP error about a translated packet. The quoted packet went in the other direction,
 * so the entry of its reply applies: at both hooks the error is translated like that reply.
 *
 * A redirect about one is dropped, as the kernel's NAT does: who obeys it sends past the programs.
 */
#ifndef EBPFLB_PATH_ICMP_ERROR_H
#define EBPFLB_PATH_ICMP_ERROR_H

#include "net/icmp_error.h"
#include "engine/flows/direct.h"
#include "core/outcome.h"
#include "path/reply_to_device.h"

/* Whether the packet is a redirect about a packet of a flow, in either direction. */
static __always_inline bool redirects_flow(struct __sk_buff *ctx, const struct packet *packet,
					   struct related *related)
{
	struct tuple *quoted = &related->quote.tuple;

	if (!flows_may_exist() || !redirected_read(ctx, packet, &related->quote))
		return false;
	quoted->hook = HOOK_EGRESS;
	tuple_write_reverse(&related->reply_tuple, quoted, HOOK_EGRESS);
	return flow_find(quoted) || flow_find(&related->reply_tuple);
}

/*
 * Sets what the error's tuple (onward->to) and that of the packet it quotes become, by the entry of the
 * quoted packet's reply. A router on the way keeps its own address; the quoted packet's destination is
 * translated.
 */
static __always_inline void related_translate(struct related *related, const struct flow *entry,
					      struct tuple *to, const enum hook hook)
{
	struct tuple translated = flow_translate(&related->reply_tuple, entry);

	tuple_write_reverse(&related->quoted, &translated, 0);
	if (hook == HOOK_INGRESS)
		to->destination = entry->address;
	else if (address_equal(&to->source, &related->quote.tuple.destination))
		to->source = entry->address;
}

static __always_inline struct outcome icmp_error_translate(struct __sk_buff *ctx,
							   const struct packet *packet,
							   struct onward *onward,
							   struct related *related,
							   const enum hook hook)
{
	const struct tuple *quote = &related->quote.tuple;
	struct flow *flow, *known = &onward->known;

	if (hook == HOOK_EGRESS && redirects_flow(ctx, packet, related))
		return unchanged(VERDICT_REDIRECT);
	/* An error goes to the sender of the quoted packet; any other error is forged. */
	if (!quote_read(ctx, packet, &related->quote) ||
	    !address_equal(&packet->tuple.destination, &quote->source))
		return undecided();
	tuple_write_reverse(&related->reply_tuple, quote, hook);
	onward->to = packet->tuple;
	related->quoted = *quote;
	flow = flow_find(&related->reply_tuple);
	if (flow && !flow_copy(known, &related->reply_tuple, flow))
		return unchanged(VERDICT_RECYCLED);
	if (flow && (known->kind == FLOW_SNAT_PENDING || entry_is_not_for(known, ctx->ifindex)))
		return undecided();
	if (flow)
		related_translate(related, known, &onward->to, hook);
	if (hook == HOOK_INGRESS)
		error_lead_to_device(ctx, packet, onward, related);
	if (!flow && !onward->device)
		return undecided();
	error_rewrite(ctx, packet, &onward->to, &related->quote, &related->quoted);
	return rewritten(VERDICT_RELATED);
}

#endif
