/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The engine netfilter: ingress writes the id of the selected backend to skb->priority; constant
 * rules of nftables in PREROUTING, one for each protocol and family, translate by a map of ids
 * (ebpflb/kernel/netfilter/rules.py). The packet is not changed here. The kernel's conntrack makes,
 * times and ends the entry.
 *
 * A packet of a connection that conntrack knows never meets the rule, so its choice is ignored.
 * That is why choosing again does no harm:
 *
 *   TCP    a SYN is chosen for as any new connection. Later segments get the same backend, as far as
 *          a hash of their tuple leads to it: after conntrack -F their connection goes on.
 *   UDP    no datagram says that it is the first. What a flow got is remembered as long as
 *          conntrack would keep an unanswered one, so counters, rotation and session affinity count
 *          flows and not datagrams. The first datagram after a flow's backend was removed tells the
 *          agent, which deletes conntrack's entry.
 *   SCTP   an INIT, where the kernel's NAT can translate SCTP
 *
 * skb->priority is 0 when a packet comes in by a veth pair or from the wire. Whatever else has our
 * prefix there was not written by us, and is removed; ip6_forward leaves ours in place, so egress
 * removes it too.
 */
#ifndef EBPFLB_ENGINE_NETFILTER_CHOOSE_H
#define EBPFLB_ENGINE_NETFILTER_CHOOSE_H

#include "core/outcome.h"
#include "core/tuple.h"
#include "rules/backend.h"
#include "rules/policy.h"

static __always_inline bool has_choice(const struct __sk_buff *ctx)
{
	return (ctx->priority & CHOSEN_MASK) == CHOSEN;
}

static __always_inline void remove_choice(struct __sk_buff *ctx)
{
	if (has_choice(ctx))
		ctx->priority = 0;
}

/*
 * At ingress: whether the program at a port of this bridge has chosen already. A choice at
 * any other device was not written by our programs, and is removed.
 */
static __always_inline bool port_has_chosen(struct __sk_buff *ctx)
{
	struct device *device;

	if (!has_choice(ctx))
		return false;
	device = LOOKUP_NUMBER(struct device, devices, ctx->ifindex);
	if (device && device->flags & DEVICE_MASTER)
		return true;
	ctx->priority = 0;
	return false;
}

static __always_inline bool netfilter_is_chosen(const struct settings *settings)
{
	return (settings->flags & (SETTING_NETFILTER | SETTING_SHADOW)) == SETTING_NETFILTER;
}

/*
 * Connections of a service with least-connections are counted, and no program is told when conntrack
 * ends one: they are left to the flow tables.
 */
static __always_inline bool netfilter_takes(const struct packet *packet,
					    const struct settings *settings,
					    const struct service *service)
{
	if (!netfilter_is_chosen(settings) || service->flags & SERVICE_LEAST_CONNECTIONS)
		return false;
	return packet->tuple.protocol != SCTP || settings->flags & SETTING_NETFILTER_SCTP;
}

/*
 * Whether the backend still serves. An id is given to another one only after all other ids, and a
 * choice is not remembered for that long.
 */
static __always_inline bool chosen_is_there(__u32 chosen)
{
	__u32 *slot = LOOKUP_NUMBER(__u32, backend_slots, chosen & CHOSEN_ID);

	return slot && *slot < ENTRIES_slots;
}

#ifdef RECORD

/* `ebpflb explain` moves no flow. */
static __always_inline void datagram_report_move(const struct tuple *tuple, __u32 service)
{
}

#else

/*
 * The flow had a backend that no longer serves it: conntrack still leads it there, until the agent
 * has deleted the entry. A report that the ring has no room for is lost; the agent also searches.
 */
static __always_inline void datagram_report_move(const struct tuple *tuple, __u32 service)
{
	struct datagram_choice *found = LOOKUP(struct datagram_choice, udp_choices, tuple);
	struct datagram_choice former ALIGNED;

	if (!found || !COPY_CHECKED(&former, tuple, found))
		return;
	if (former.service != service || !chosen_is_there(former.chosen))
		bpf_ringbuf_output(MAP(moved_flows), (void *)tuple, sizeof(*tuple), 0);
}

#endif

static __always_inline void datagram_remember(const struct tuple *tuple,
					      const struct settings *settings, __u32 service,
					      __u32 chosen)
{
	struct datagram_choice choice ALIGNED = { .service = service,
						  .chosen = chosen,
						  .frontend_moves = settings->frontend_moves,
						  .last_used = clock_coarse() };

	choice.check = check_of(CHECK_SUM(tuple, &choice));
	bpf_map_update_elem(MAP(udp_choices), tuple, &choice, BPF_ANY);
}

/*
 * As long as this is the same, a place of recent_choices counts: for segments always; for datagrams
 * until frontends move, and for 256 jiffies (0.26 to 2.6 s, by CONFIG_HZ), so that udp_choices knows
 * when the flow was last used. Jiffies are read without a call.
 */
static __always_inline __u32 choice_epoch(const struct tuple *tuple, const struct settings *settings)
{
	if (tuple->protocol != UDP)
		return 0;
	return settings->frontend_moves * 0x9e3779b1 + (__u32)(jiffies64() >> 8);
}

/* What names the tuple, and the epoch, in its place. */
static __always_inline __u32 choice_tag(__u64 hash, const struct tuple *tuple,
					const struct settings *settings)
{
	return (__u32)(hash >> 32) ^ choice_epoch(tuple, settings);
}

static __always_inline __u64 *choice_place(__u64 hash)
{
	return LOOKUP_NUMBER(__u64, recent_choices, hash % ENTRIES_recent_choices);
}

/* Whether it is known what a packet of this tuple gets; then it has got it. */
static __always_inline bool choice_repeats(struct __sk_buff *ctx, const struct tuple *tuple,
					   const struct settings *settings)
{
	__u64 hash = tuple_mix(tuple), *place = choice_place(hash), known = place ? *place : 0;
	__u32 chosen = known;

	if (known >> 32 != choice_tag(hash, tuple, settings))
		return false;
	if (!chosen)
		return true;
	if (!chosen_is_there(chosen))
		return false;
	ctx->priority = chosen;
	return true;
}

/* The choice that the packet has, or that it has none. */
static __always_inline void choice_remember(const struct __sk_buff *ctx, const struct tuple *tuple,
					    const struct settings *settings)
{
	__u64 hash = tuple_mix(tuple), *place = choice_place(hash);
	__u64 tag = choice_tag(hash, tuple, settings);

	if (place)
		*place = tag << 32 | (has_choice(ctx) ? ctx->priority : 0);
}

/*
 * Whether the flow's last choice still counts: then it is the packet's. It does after a change to the
 * flow tables too: conntrack has the flow, and would see two where they open another.
 */
static __always_inline bool datagram_repeats(struct __sk_buff *ctx, const struct packet *packet,
					     const struct settings *settings)
{
	struct datagram_choice *found, known ALIGNED;
	__u64 now = clock_coarse();

	if (packet->tuple.protocol != UDP || settings->flags & SETTING_SHADOW)
		return false;
	found = LOOKUP(struct datagram_choice, udp_choices, &packet->tuple);
	if (!found || !COPY_CHECKED(&known, &packet->tuple, found) ||
	    known.frontend_moves != settings->frontend_moves ||
	    now > known.last_used + settings->udp_timeout * SECOND ||
	    !chosen_is_there(known.chosen))
		return false;
	if (found->last_used != now)
		found->last_used = now;
	ctx->priority = known.chosen;
	choice_remember(ctx, &packet->tuple, settings);
	record_at(STEP_CHOSEN, known.chosen, &packet->tuple.destination);
	return true;
}

/* Undecided where the flow tables take the flow. */
static __always_inline struct outcome leave_to_netfilter(struct __sk_buff *ctx,
							 const struct packet *packet,
							 const struct settings *settings,
							 const struct selection *selection)
{
	__u32 chosen = CHOSEN | selection->backend.id;
	enum masquerade_reason masquerade;

	if (!netfilter_takes(packet, settings, &selection->service))
		return undecided();
	masquerade = policy_masquerades(settings, selection, &packet->tuple.source);
	if (masquerade) {
		record(STEP_SNAT, masquerade);
		chosen |= CHOSEN_MASQUERADE;
	}
	if (packet->tuple.protocol == UDP) {
		datagram_report_move(&packet->tuple, selection->service.id);
		datagram_remember(&packet->tuple, settings, selection->service.id, chosen);
	}
	ctx->priority = chosen;
	choice_remember(ctx, &packet->tuple, settings);
	record_at(STEP_CHOSEN, chosen, &selection->backend.address);
	return unchanged(masquerade ? VERDICT_MASQUERADED : VERDICT_TRANSLATED);
}

#endif
