/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The doors at every device (tc, clsact or tcx), where netfilter would translate:
 *
 *   ingress  before the stack: what asks for a frontend is sent to a backend; what answers a
 *            masqueraded flow, to its client
 *   egress   after the stack: what answers a client comes from the frontend; what must come back
 *            to this node goes as this node's
 *
 * Between them the stack sees client and backend talk to each other, in both directions, and
 * routes, filters and tracks them as it likes.
 */
#include "compat.h"
#include "maps.h"
#include "net/rewrite.h"
#include "net/transport.h"
#include "path/ingress.h"
#include "path/fragment.h"
#include "path/egress.h"
#include "path/reject_packet.h"
#include "path/icmp_error.h"

#define GO_ON (-1)	/* TC_ACT_UNSPEC, TCX_NEXT: whoever else is attached has its turn */
#define DROP 2

/* The hook is handed on as a constant, so that each program holds its own half alone. */
static __always_inline enum verdict pass_transport(struct __sk_buff *ctx, struct packet *packet,
						   const enum hook hook)
{
	enum reading reading = packet_read_transport(ctx, packet);
	struct tuple to = {};
	enum verdict verdict;

	if (reading != READ)
		return reading == FOREIGN ? VERDICT_PASSED : VERDICT_MALFORMED;
	if (packet->piece == LATER && !fragment_follow(packet))
		return VERDICT_PASSED;
	verdict = hook == HOOK_INGRESS ? arrive(ctx, packet, &to)
				       : leave(ctx, packet, &to);
	if (packet->piece == FIRST)
		fragment_learn(packet, to.protocol);
	if (to.protocol)
		packet_rewrite(ctx, packet, &to);
	return verdict;
}

/* A ping is answered as what asks for a port that nobody serves (kube-proxy.md 6.3). */
static __always_inline enum verdict pass_icmp(struct __sk_buff *ctx, struct packet *packet,
					      const enum hook hook)
{
	enum verdict verdict = related(ctx, packet);

	if (verdict != VERDICT_PASSED || hook != HOOK_INGRESS || !echo_is_asked(ctx, packet))
		return verdict;
	return policy_unserved(&packet->tuple.destination);
}

static __always_inline enum verdict pass(struct __sk_buff *ctx, struct packet *packet,
					 const enum hook hook)
{
	enum reading reading = packet_read_ip(ctx, packet);

	if (reading != READ)
		return reading == FOREIGN ? VERDICT_PASSED : VERDICT_MALFORMED;
	if (packet->tuple.protocol == ICMP || packet->tuple.protocol == ICMPV6)
		return pass_icmp(ctx, packet, hook);
	return pass_transport(ctx, packet, hook);
}

static __always_inline int act(enum verdict verdict)
{
	switch (verdict) {
	case VERDICT_NO_LOCAL_ENDPOINT:
	case VERDICT_RECYCLED:
	case VERDICT_PORTS_EXHAUSTED:
	case VERDICT_FLOWS_FULL:
	case VERDICT_SOURCE_DENIED:
	case VERDICT_UNALLOCATED:
	case VERDICT_REJECT_LIMITED:
		return DROP;
	default:
		return GO_ON;
	}
}

PROGRAM("tc/ingress")
int ingress(struct __sk_buff *ctx)
{
	struct packet packet = { .tuple = { .hook = HOOK_INGRESS } };
	enum verdict verdict = verdict_count(pass(ctx, &packet, HOOK_INGRESS));

	if (verdict != VERDICT_REFUSED)
		return act(verdict);
	if (!refuse(ctx, &packet))
		return act(verdict_count(VERDICT_REJECT_LIMITED));
	swap_link(ctx);
	return bpf_redirect(ctx->ifindex, 0);
}

PROGRAM("tc/egress")
int egress(struct __sk_buff *ctx)
{
	struct packet packet = { .tuple = { .hook = HOOK_EGRESS } };
	enum verdict verdict = verdict_count(pass(ctx, &packet, HOOK_EGRESS));

	if (verdict == VERDICT_REFUSED && !refuse(ctx, &packet))
		verdict = verdict_count(VERDICT_REJECT_LIMITED);
	return act(verdict);
}

LICENSE("GPL")
