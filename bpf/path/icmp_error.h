/* SPDX-License-Identifier: GPL-2.0 */
/*
 * An ICMP error about a translated packet. The quoted packet went the other way, so the entry of
 * the answer to it says what to do: at both hooks the error is translated as an answer would be.
 */
#ifndef EBPFLB_PATH_ICMP_ERROR_H
#define EBPFLB_PATH_ICMP_ERROR_H

#include "net/icmp_error.h"
#include "path/direct.h"
#include "path/verdict.h"

static __always_inline enum verdict related(struct __sk_buff *ctx, const struct packet *packet)
{
	struct quote quote = {};

	/* It goes to who sent the quoted packet, or else it is forged. */
	if (!quote_read(ctx, packet, &quote) ||
	    !address_equal(&packet->tuple.destination, &quote.tuple.source))
		return VERDICT_PASSED;
	struct tuple answer = tuple_reverse(&quote.tuple, packet->tuple.hook);
	struct flow *flow = flow_find(&answer);

	if (!flow || !flow->port || beside_elsewhere(flow, ctx->ifindex))
		return VERDICT_PASSED;
	struct tuple to = packet->tuple, translated = flow_translate(&answer, flow);
	struct tuple quoted = tuple_reverse(&translated, 0);

	/* Routers on the way speak for themselves; whoever was quoted speaks as the frontend. */
	if (packet->tuple.hook == HOOK_INGRESS)
		to.destination = flow->address;
	else if (address_equal(&to.source, &quote.tuple.destination))
		to.source = flow->address;
	error_rewrite(ctx, packet, &to, &quote, &quoted);
	return VERDICT_RELATED;
}

#endif
