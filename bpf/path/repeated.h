/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The first thing at ingress on the engine netfilter: most packets belong to a connection that
 * conntrack knows, or are for no frontend. Their tuple is enough to tell, and what the same tuple got
 * last. Any other packet is decided on by path/ingress.h, which would lead to the same end here, by
 * more steps.
 */
#ifndef EBPFLB_PATH_REPEATED_H
#define EBPFLB_PATH_REPEATED_H

#include "core/counters.h"
#include "engine/flows/gate.h"
#include "engine/netfilter/choose.h"
#include "net/packet.h"
#include "path/parse.h"
#include "rules/frontend.h"

/* What the tools' variants record is what path/ingress.h does. */
#if defined(WHOLE_WAY) || defined(RECORD) || defined(MONITOR)

static __always_inline bool packet_is_repeated(struct __sk_buff *ctx)
{
	return false;
}

#else

/* Whether the tuple is enough; then the packet has got its choice, if it has one, and is counted. */
static __always_inline bool tuple_is_repeated(struct __sk_buff *ctx, const struct tuple *tuple,
					      const struct settings *settings)
{
	struct frontend frontend = tuple_frontend(tuple);

	if (!frontend_may_exist(&frontend)) {
		if (tuple->protocol == UDP && (address_may_have_use(&frontend.address) ||
					       address_may_be_vip(settings, &frontend.address)))
			return false;
		verdict_count(VERDICT_PASSED);
		return true;
	}
	if (!choice_repeats(ctx, tuple, settings))
		return false;
	verdict_count(tuple->protocol == UDP ? VERDICT_ESTABLISHED : VERDICT_PASSED);
	return true;
}

static __always_inline bool packet_is_repeated(struct __sk_buff *ctx)
{
	struct settings *settings = settings_read();
	struct tuple v4 = { .hook = HOOK_INGRESS }, v6 = { .hook = HOOK_INGRESS };

	if (!netfilter_is_chosen(settings) || flows_may_exist() ||
	    ctx->pkt_type == TO_OTHER_HOST || vlan_is_foreign(ctx))
		return false;
	if (ctx->protocol == BE16(ETHERTYPE_IPV4))
		return glance_v4(ctx, &v4) && tuple_is_repeated(ctx, &v4, settings);
	return ctx->protocol == BE16(ETHERTYPE_IPV6) && glance_v6(ctx, &v6) &&
	       tuple_is_repeated(ctx, &v6, settings);
}

#endif

#endif
