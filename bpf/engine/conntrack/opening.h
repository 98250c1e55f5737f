/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The latest flows that were opened in conntrack. Each takes the place of the one that was opened
 * OPENINGS flows before, and what is to be done about that one is done then:
 *
 *   its packet was dropped    by netfilter: it has not come to egress. A rule of netfilter would
 *                             have made no entry for it; ours expires, unless a reply was seen.
 *   its client is pending     session affinity is remembered, if the flow was answered.
 *
 * A note in the packet tells egress which flow it has opened, one of the latest NOTES. Each program
 * behind ours that returns TC_ACT_OK takes it away, so that no packet is known to have left. That
 * shows by a flow that was answered all the same: for NOTE_LOST_SECONDS after one, no packet is taken
 * for dropped.
 */
#ifndef EBPFLB_ENGINE_CONNTRACK_OPENING_H
#define EBPFLB_ENGINE_CONNTRACK_OPENING_H

#include "engine/conntrack/entry.h"
#include "path/affinity.h"
#include "path/note.h"

#define DROPPED_AFTER (SECOND / 10)	/* by then a packet has come from ingress to egress */

/* The status of a flow's entry, 0 if there is none. The entry expires if it has none of `proofs`. */
static __always_inline __u64 opening_expire(struct __sk_buff *ctx, struct ct_key *key, __u64 proofs)
{
	EMPTY(struct ct_options, options);
	struct nf_conn *entry = ct_lookup(ctx, key, options);
	__u64 status = 0;

	if (!entry)
		return 0;
	if (options->direction == DIRECTION_ORIGINAL)
		status = ct_status(entry);
	if (status && !(status & proofs))
		bpf_ct_change_timeout(entry, 0);
	bpf_ct_release(entry);
	return status;
}

/* The entry that was just made for a packet: its flow is none of conntrack's. */
static __always_inline void ct_give_up(struct __sk_buff *ctx, const struct tuple *tuple)
{
	EMPTY(struct ct_key, key);

	ct_key_write(key, tuple);
	opening_expire(ctx, key, 0);
}

/* What is left to be done about the flow that has a place. */
static __always_inline void opening_end(struct __sk_buff *ctx, struct opening_counts *counts,
					const struct opening *place, __u64 now)
{
	bool stayed = !place->left && now > place->created + DROPPED_AFTER;
	bool dropped = stayed && (!counts->note_lost ||
				  now > counts->note_lost + NOTE_LOST_SECONDS * SECOND);
	__u64 answered = place->tuple.protocol == TCP ? CT_STATUS_ASSURED : CT_STATUS_SEEN_REPLY;
	EMPTY(struct ct_key, key);
	__u64 status;

	if (!place->created || !(stayed || place->is_pending))
		return;
	ct_key_write(key, &place->tuple);
	status = opening_expire(ctx, key, dropped ? CT_STATUS_SEEN_REPLY : ~0ULL);
	if (stayed && status & CT_STATUS_SEEN_REPLY)
		counts->note_lost = now;
	if (place->is_pending && status & answered)
		affinity_confirm(&place->tuple.source, place->service, place->backend,
				 place->created);
}

static __always_inline struct opening *opening_at(__u64 number)
{
	return LOOKUP_NUMBER(struct opening, openings, number % OPENINGS);
}

static __always_inline struct opening_counts *opening_counts_find(void)
{
	return LOOKUP_NUMBER(struct opening_counts, opening_counts, 0);
}

/*
 * To be called for every flow that was opened. Two CPUs may come to one place at once: then nothing
 * is done about one of the two flows.
 */
static __always_inline void opening_note(struct __sk_buff *ctx, const struct packet *packet,
					 const struct selection *selection)
{
	const struct backend *backend = &selection->backend;
	struct opening_counts *counts = opening_counts_find();
	__u64 number, now = bpf_ktime_get_ns();
	struct opening *place;

	if (!counts)
		return;
	number = counts->opened++;
	place = opening_at(number);
	if (!place)
		return;
	opening_end(ctx, counts, place, now);
	place->tuple = packet->tuple;
	place->created = now;
	place->service = selection->service.id;
	place->backend = backend->id;
	place->left = LOOKUP(__u32, own_addresses, &backend->address) != NULL;
	place->is_pending = selection->is_pending;
	note_write(ctx, number % NOTES + 1);
}

/* To be called for every packet at egress: the skb has kept what opening_note wrote to it. */
static __always_inline void opening_leaves(struct __sk_buff *ctx)
{
	__u64 note = note_read(ctx), latest;
	struct opening_counts *counts;
	struct opening *place;

	if (!note || note > NOTES)
		return;
	counts = opening_counts_find();
	if (!counts)
		return;
	latest = counts->opened - 1;
	place = opening_at(latest - (latest - (note - 1)) % NOTES);
	note_write(ctx, 0);
	if (place)
		place->left = true;
}

#endif
