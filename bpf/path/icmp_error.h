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
static __always_inline bool redirects_flow(struct __sk_buff *ctx, const struct packet *packet)
{
	struct quote quote = {};
	struct tuple reverse;

	if (!flows_may_exist() || !redirected_read(ctx, packet, &quote))
		return false;
	quote.tuple.hook = HOOK_EGRESS;
	reverse = tuple_reverse(&quote.tuple, HOOK_EGRESS);
	return flow_find(&quote.tuple) || flow_find(&reverse);
}

static __always_inline struct outcome icmp_error_translate(struct __sk_buff *ctx,
							   const struct packet *packet,
							   struct onward *onward,
							   const enum hook hook)
{
	struct flow *known = &onward->known;
	struct quote quote = {};

	if (hook == HOOK_EGRESS && redirects_flow(ctx, packet))
		return unchanged(VERDICT_REDIRECT);
	/* An error goes to the sender of the quoted packet; any other error is forged. */
	if (!quote_read(ctx, packet, &quote) ||
	    !address_equal(&packet->tuple.destination, &quote.tuple.source))
		return undecided();
	struct tuple reply_tuple = tuple_reverse(&quote.tuple, hook);
	struct tuple to = packet->tuple, quoted = quote.tuple;
	struct flow *flow = flow_find(&reply_tuple);

	if (flow && !flow_copy(known, &reply_tuple, flow))
		return unchanged(VERDICT_RECYCLED);
	if (flow && (known->kind == FLOW_SNAT_PENDING || entry_is_not_for(known, ctx->ifindex)))
		return undecided();
	if (flow) {
		struct tuple translated = flow_translate(&reply_tuple, known);

		quoted = tuple_reverse(&translated, 0);
		/* A router on the way keeps its own address; the quoted packet's destination is translated. */
		if (hook == HOOK_INGRESS)
			to.destination = known->address;
		else if (address_equal(&to.source, &quote.tuple.destination))
			to.source = known->address;
	}
	if (hook == HOOK_INGRESS)
		error_lead_to_device(ctx, packet, onward, &to, &quoted);
	if (!flow && !onward->device)
		return undecided();
	error_rewrite(ctx, packet, &to, &quote, &quoted);
	return rewritten(VERDICT_RELATED);
}

#endif
