/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The engine netfilter: ingress writes the id of the selected backend to skb->priority; constant
 * rules of nftables in PREROUTING, one for each protocol and family, translate by a map of ids
 * (ebpflb/kernel/netfilter/table.py). The packet is not changed here. The kernel's conntrack makes,
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
 * prefix there was not written by us, and is removed. ip_forward overwrites ours, ip6_forward leaves
 * it in place. The rules remove it from a flow's first packet. No rule sees the others: in their choice
 * the id is shifted, as qdiscs (pfifo_fast, mqprio, fq) pick a band by the lowest four bits. The first
 * one's is not: an earlier version that comes back writes its rules, which know no lifted bits, before
 * it attaches its programs. After a silence a datagram is a flow's first one again.
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

/*
 * Whether the program at a port of this bridge has seen the packet: perhaps (DEVICE_MASTER), or certainly
 * (DEVICE_ALL_PORTS). `ebpflb explain` asks the bridge in place of its port.
 */
static __always_inline bool port_has_decided(const struct __sk_buff *ctx, const __u32 flag)
{
#ifdef RECORD
	return false;
#else
	struct device *device = LOOKUP_NUMBER(struct device, devices, ctx->ifindex);

	return device && device->flags & flag;
#endif
}

/*
 * At ingress: whether the program at a port of this bridge has chosen already. A choice at
 * any other device was not written by our programs, and is removed.
 */
static __always_inline bool port_has_chosen(struct __sk_buff *ctx)
{
	if (!has_choice(ctx))
		return false;
	if (port_has_decided(ctx, DEVICE_MASTER))
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
 * ends one: they are left to the flow tables, once these may open flows.
 */
static __always_inline bool netfilter_takes(const struct packet *packet,
					    const struct settings *settings,
					    const struct service *service)
{
	if (!netfilter_is_chosen(settings))
		return false;
	if (service->flags & SERVICE_LEAST_CONNECTIONS && !(settings->flags & SETTING_ATTACHING))
		return false;
	return packet->tuple.protocol != SCTP || settings->flags & SETTING_NETFILTER_SCTP;
}

static __always_inline __u32 choice_lifted(__u32 backend)
{
	__u32 band = backend & CHOSEN_BAND;

	if (backend >> CHOSEN_LIFT)
		return CHOSEN | backend;
	return CHOSEN | CHOSEN_LIFTED | (backend ^ band) | band << CHOSEN_LIFT;
}

/* Whether the backend still serves the service for which it was chosen. */
static __always_inline bool chosen_is_there(__u32 service, __u32 chosen)
{
	__u32 id = chosen & CHOSEN_ID;

	if (chosen & CHOSEN_LIFTED)
		id = (id & ((1 << CHOSEN_LIFT) - 1)) | id >> CHOSEN_LIFT;
	return backend_serves(service, id);
}

/* Whether conntrack still has the flow, if nobody has deleted it. */
static __always_inline bool datagram_is_recent(const struct datagram_choice *known,
					       const struct settings *settings, __u64 now)
{
	return now <= known->last_used + settings->udp_timeout * SECOND;
}

#ifdef RECORD

/* `ebpflb explain` moves no flow. */
static __always_inline bool datagram_is_known(const struct tuple *tuple,
					      const struct settings *settings, __u32 service)
{
	return false;
}

#else

/*
 * Whether the flow has a backend. If that no longer serves it conntrack still leads it there, until the
 * agent has deleted the entry. A report that the ring has no room for is lost; the agent also searches.
 */
static __always_inline bool datagram_is_known(const struct tuple *tuple,
					      const struct settings *settings, __u32 service)
{
	struct datagram_choice *found = LOOKUP(struct datagram_choice, udp_choices, tuple);
	struct datagram_choice former ALIGNED;

	if (!found || !COPY_CHECKED(&former, tuple, found))
		return false;
	if (former.service != service || !chosen_is_there(service, former.chosen))
		bpf_ringbuf_output(MAP(moved_flows), (void *)tuple, sizeof(*tuple), 0);
	return datagram_is_recent(&former, settings, clock_coarse());
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
 * A place of recent_choices counts in one epoch. Datagrams': until frontends move, and for 256 jiffies
 * (0.26 to 2.6 s, by CONFIG_HZ), so that udp_choices knows when a flow was last used. Segments': for 8192
 * jiffies (8 to 82 s), and for the next epoch if one comes in it. Jiffies are read without a call.
 */
static __always_inline __u64 choice_epoch(const struct tuple *tuple, const struct settings *settings)
{
	if (tuple->protocol != UDP)
		return jiffies64() >> 13;
	return ((__u64)settings->frontend_moves << 32) + (jiffies64() >> 8);
}

/* What names the tuple in an epoch, and the choice that it got. */
static __always_inline __u64 choice_name(__u64 hash, __u64 choice, __u64 epoch)
{
	return hash ^ epoch * 0x9e3779b97f4a7c15ULL ^ choice * 0xbf58476d1ce4e5b9ULL;
}

static __always_inline struct recent_choice *choice_place(__u64 hash)
{
	return LOOKUP_NUMBER(struct recent_choice, recent_choices, hash % ENTRIES_recent_choices);
}

/* Whether the place has this choice of the tuple; a segment's then counts in this epoch. */
static __always_inline bool choice_counts(struct recent_choice *place, const struct tuple *tuple,
					  const struct settings *settings, __u64 hash, __u64 choice)
{
	__u64 epoch = choice_epoch(tuple, settings);

	if (place->name == choice_name(hash, choice, epoch))
		return true;
	if (tuple->protocol == UDP || place->name != choice_name(hash, choice, epoch - 1))
		return false;
	place->name = choice_name(hash, choice, epoch);
	return true;
}

/* Whether it is known what a packet of this tuple gets; then it has got it. */
static __always_inline bool choice_repeats(struct __sk_buff *ctx, const struct tuple *tuple,
					   const struct settings *settings)
{
	__u64 hash = tuple_mix(tuple);
	struct recent_choice *place = choice_place(hash);
	__u64 choice = place ? place->choice : 0;
	__u32 chosen;

	OPAQUE(choice); /* it is read once */
	chosen = choice;
	if (!place || !choice_counts(place, tuple, settings, hash, choice))
		return false;
	if (!chosen)
		return true;
	if (!chosen_is_there(choice >> 32, chosen))
		return false;
	ctx->priority = chosen;
	return true;
}

/* The choice that the packet has, or that it has none. */
static __always_inline void choice_remember(const struct __sk_buff *ctx, const struct tuple *tuple,
					    const struct settings *settings, __u32 service)
{
	__u64 choice = has_choice(ctx) ? (__u64)service << 32 | ctx->priority : 0;
	__u64 hash = tuple_mix(tuple);
	struct recent_choice *place = choice_place(hash);

	if (!place)
		return;
	place->name = choice_name(hash, choice, choice_epoch(tuple, settings));
	place->choice = choice;
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
	    !datagram_is_recent(&known, settings, now) ||
	    !chosen_is_there(known.service, known.chosen))
		return false;
	if (found->last_used != now)
		found->last_used = now;
	ctx->priority = known.chosen;
	choice_remember(ctx, &packet->tuple, settings, known.service);
	record_at(STEP_CHOSEN, known.chosen, &packet->tuple.destination);
	return true;
}

/* Undecided where the flow tables take the flow. */
static __always_inline struct outcome leave_to_netfilter(struct __sk_buff *ctx,
							 const struct packet *packet,
							 const struct settings *settings,
							 const struct selection *selection)
{
	__u32 chosen = choice_lifted(selection->backend.id);
	bool is_first = packet->opens;
	enum masquerade_reason masquerade;

	if (!netfilter_takes(packet, settings, &selection->service))
		return undecided();
	masquerade = policy_masquerades(settings, selection, &packet->tuple.source);
	if (masquerade) {
		record(STEP_SNAT, masquerade);
		chosen |= CHOSEN_MASQUERADE;
	}
	if (packet->tuple.protocol == UDP) {
		is_first = !datagram_is_known(&packet->tuple, settings, selection->service.id);
		datagram_remember(&packet->tuple, settings, selection->service.id, chosen);
	}
	ctx->priority = chosen;
	choice_remember(ctx, &packet->tuple, settings, selection->service.id);
	if (is_first)
		ctx->priority = CHOSEN | (chosen & CHOSEN_MASQUERADE) | selection->backend.id;
	record_at(STEP_CHOSEN, chosen, &selection->backend.address);
	return unchanged(masquerade ? VERDICT_MASQUERADED : VERDICT_TRANSLATED);
}

#endif
