/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Rejects a packet like a port without a listener (kube-proxy.md 6.1), or answers a ping, each at most a
 * thousand times a second on each CPU. Further packets are dropped, so that the replies cannot become a
 * flood. Clients share the budgets of pings by a hash of their addresses: a flood leaves nearly all
 * others their answers. An answer is no larger than its ping.
 */
#ifndef EBPFLB_PATH_REJECT_PACKET_H
#define EBPFLB_PATH_REJECT_PACKET_H

#include "core/tuple.h"
#include "net/echo.h"
#include "net/reset.h"
#include "net/unreachable.h"
#include "path/attempt.h"

#define REJECTS 1000
#define PING_BUDGETS (ENTRIES_reject_budgets - 1)
#define REFILL 1000000000ULL	/* ns */

/* The first budget is that of refusals. */
static __always_inline __u32 reply_budget(const struct packet *packet, bool is_ping)
{
	return is_ping ? 1 + packet_client(&packet->tuple.source, true) % PING_BUDGETS : 0;
}

static __always_inline bool reply_within_budget(const __u32 which)
{
	struct reject_budget *budget = LOOKUP_NUMBER(struct reject_budget, reject_budgets, which);
	__u64 now = clock_coarse();

	if (!budget)
		return false;
	if (now >= budget->refilled + REFILL) {
		budget->refilled = now;
		budget->left = REJECTS;
	}
	if (!budget->left)
		return false;
	budget->left -= 1;
	return true;
}

/*
 * Turns a packet into its reply: one that refuses it, or tells the MTU that it exceeds, or answers the ping.
 * Returns false over the limit, and for a packet with options or extension headers.
 */
static __always_inline bool reply_packet(struct __sk_buff *ctx, const struct packet *packet,
					 bool is_ping, __u16 mtu)
{
	EMPTY(struct tuple, to);

	tuple_write_reverse(to, &packet->tuple, 0);
	if (packet->options || packet->piece == LATER || (is_ping && packet->piece != WHOLE) ||
	    !reply_within_budget(reply_budget(packet, is_ping)))
		return false;
	vlan_forget_priority(ctx);
	if (is_ping)
		return respond_echo(ctx, packet, to);
	if (packet->tuple.protocol == TCP && !mtu)
		return respond_reset(ctx, packet, to);
	return packet->v6 ? respond_unreachable_v6(ctx, packet, to, mtu)
			  : respond_unreachable_v4(ctx, packet, to, mtu);
}

#endif
