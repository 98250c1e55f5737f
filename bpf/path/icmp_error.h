/* SPDX-License-Identifier: GPL-2.0 */
/*
 * An ICMP error about a translated packet. The quoted packet went the other way, so the entry of
 * its reply says what to do: at both hooks the error is translated as that reply would be.
 */
#ifndef EBPFLB_PATH_ICMP_ERROR_H
#define EBPFLB_PATH_ICMP_ERROR_H

#include "net/icmp_error.h"
#include "engine/flows/direct.h"

static __always_inline enum verdict icmp_error_translate(struct __sk_buff *ctx,
							 const struct packet *packet)
{
	struct quote quote = {};

	/* An error goes to the sender of the quoted packet; anything else is forged. */
	if (!quote_read(ctx, packet, &quote) ||
	    !address_equal(&packet->tuple.destination, &quote.tuple.source))
		return VERDICT_PASSED;
	struct tuple reply_tuple = tuple_reverse(&quote.tuple, packet->tuple.hook);
	struct flow *flow = flow_find(&reply_tuple);

	if (!flow || flow->kind == FLOW_SNAT_PENDING ||
	    entry_is_not_for(flow, ctx->ifindex))
		return VERDICT_PASSED;
	struct tuple to = packet->tuple, translated = flow_translate(&reply_tuple, flow);
	struct tuple quoted = tuple_reverse(&translated, 0);

	/* A router on the way keeps its own address; the quoted packet's destination is translated. */
	if (packet->tuple.hook == HOOK_INGRESS)
		to.destination = flow->address;
	else if (address_equal(&to.source, &quote.tuple.destination))
		to.source = flow->address;
	error_rewrite(ctx, packet, &to, &quote, &quoted);
	return VERDICT_RELATED;
}

#endif
