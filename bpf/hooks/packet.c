/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The hooks at every device (tc: tcx or clsact), where netfilter would translate.
 *
 *   ingress  before the stack: DNAT of requests to a frontend, un-SNAT of replies to a masqueraded
 *            flow
 *   egress   after the stack: un-DNAT of replies to a client, SNAT of requests whose replies must
 *            come back to this node
 *
 * Between the hooks the stack sees client and backend talk to each other, in both directions, and
 * routes, filters and tracks their packets as any others.
 */
#include "compat.h"
#include "maps.h"
#include "net/rewrite.h"
#include "net/transport.h"
#include "path/egress.h"
#include "path/fragment.h"
#include "path/icmp_error.h"
#include "path/ingress.h"
#include "path/reject_packet.h"

#define GO_ON (-1)	/* TC_ACT_UNSPEC, TCX_NEXT: the next program has its turn */
#define DROP 2

/* --packet-mark: by it rules of netfilter recognize what was translated before they see it. */
static __always_inline void packet_mark(struct __sk_buff *ctx, const enum hook hook)
{
	struct settings *settings = settings_read();

	if (hook == HOOK_INGRESS && settings && settings->mark_mask)
		ctx->mark = (ctx->mark & ~settings->mark_mask) | settings->mark;
}

/*
 * Errors are translated. Pings to a cluster IP in use are refused, those to an unallocated address
 * of a service range are dropped (kube-proxy.md 6.3).
 */
static __always_inline enum verdict handle_icmp(struct __sk_buff *ctx, struct packet *packet,
						const enum hook hook)
{
	enum verdict verdict = icmp_error_translate(ctx, packet);

	if (verdict == VERDICT_RELATED)
		packet_mark(ctx, hook);
	if (verdict != VERDICT_PASSED || hook != HOOK_INGRESS || !packet_is_echo(ctx, packet))
		return verdict;
	return no_service_verdict(address_use(&packet->tuple.destination));
}

/* TCP, UDP and SCTP. The hook is a constant, so that each program contains only its own half. */
static __always_inline enum verdict handle_transport(struct __sk_buff *ctx, struct packet *packet,
						     const enum hook hook)
{
	struct outcome outcome;
	struct tuple to = {};

	if (packet->piece == LATER && !fragment_complete(packet))
		return VERDICT_PASSED;
	outcome = hook == HOOK_INGRESS ? ingress_packet(ctx, packet, &to)
				       : egress_packet(ctx, packet, &to);
	if (packet->piece == FIRST)
		fragment_remember(packet, outcome.rewrite);
	if (outcome.rewrite) {
		packet_rewrite(ctx, packet, &to);
		packet_mark(ctx, hook);
	}
	return outcome.verdict;
}

static __always_inline enum verdict handle(struct __sk_buff *ctx, struct packet *packet,
					   const enum hook hook)
{
	enum reading reading = packet_read_ip(ctx, packet);

	if (reading == READ && packet_is_icmp(packet))
		return handle_icmp(ctx, packet, hook);
	if (reading == READ)
		reading = packet_read_transport(ctx, packet);
	if (reading == READ)
		return handle_transport(ctx, packet, hook);
	return reading == FOREIGN ? VERDICT_PASSED : VERDICT_MALFORMED;
}

/* The action that the program returns to the kernel. */
static __always_inline int action_of(enum verdict verdict)
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

/*
 * The packet was turned into the reset of one that was to leave by this device, where it had come
 * in. Its link header still leads to the next hop of that one; the reset needs its own.
 */
static __always_inline int leave_anew(struct __sk_buff *ctx)
{
#ifdef NO_LINK_HEADER
	return GO_ON;
#else
	return redirect_neigh(ctx->ifindex, NULL, 0, 0);
#endif
}

PROGRAM("tc/ingress")
int ingress(struct __sk_buff *ctx)
{
	struct packet packet = { .tuple = { .hook = HOOK_INGRESS } };
	enum verdict verdict = verdict_count(handle(ctx, &packet, HOOK_INGRESS));

	if (verdict != VERDICT_REFUSED)
		return action_of(verdict);
	if (!reject_packet(ctx, &packet))
		return action_of(verdict_count(VERDICT_REJECT_LIMITED));
	swap_link(ctx);
	return bpf_redirect(ctx->ifindex, 0);
}

PROGRAM("tc/egress")
int egress(struct __sk_buff *ctx)
{
	struct packet packet = { .tuple = { .hook = HOOK_EGRESS } };
	enum verdict verdict = verdict_count(handle(ctx, &packet, HOOK_EGRESS));

	if (verdict != VERDICT_REFUSED)
		return action_of(verdict);
	if (!reject_packet(ctx, &packet))
		return action_of(verdict_count(VERDICT_REJECT_LIMITED));
	if (ctx->ingress_ifindex)
		return leave_anew(ctx);
	/* One of the node's own is now the reply to it, and comes in as if from where it was sent. */
	swap_link(ctx);
	return bpf_redirect(ctx->ifindex, BPF_F_INGRESS);
}

LICENSE("GPL")
