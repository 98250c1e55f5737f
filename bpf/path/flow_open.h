/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A flow is opened: first the way back is claimed, then the way there is made, so that no answer
 * ever comes before it can be translated.
 *
 * Two flows of one client port to one backend, by two frontends, would look alike between the
 * hooks; the younger one's client gets another port there. So does a backend that asks itself
 * from the port that it serves, whose requests would look like answers.
 */
#ifndef EBPFLB_PATH_FLOW_OPEN_H
#define EBPFLB_PATH_FLOW_OPEN_H

#include "path/flow.h"
#include "path/policy.h"
#include "path/verdict.h"

#define TRIES 16

static __always_inline __be16 port_draw(const struct settings *settings)
{
	__u32 ports = settings->last_port - settings->first_port + 1;
	__u32 chosen = ((__u64)bpf_get_prandom_u32() * ports) >> 32;

	return BE16((__u16)(settings->first_port + chosen));
}

/* The way there of the flow that has this way back. */
static __always_inline struct tuple open_asked(const struct tuple *back, const struct flow *taken)
{
	struct tuple asked = tuple_reverse(back, HOOK_INGRESS);

	if (taken->other_port)
		asked.source_port = taken->other_port;
	asked.destination = taken->address;
	asked.destination_port = taken->port;
	return asked;
}

/* Whether a way back that is in use may be taken: our own, left by a flow that lost the other half
 * to the LRU, or that of a connection which both sides have ended. */
static __always_inline bool way_is_free(const struct flow *taken, const struct tuple *theirs,
					const struct tuple *asked)
{
	struct flow *requests;

	if (!taken->other_port && taken->port == asked->destination_port &&
	    address_equal(&taken->address, &asked->destination))
		return true;
	requests = flow_find(theirs);
	return flow_is_done(taken->flags, requests ? requests->flags : FLOW_FIN);
}

static __always_inline bool asks_itself(const struct tuple *back)
{
	return back->source_port == back->destination_port &&
	       address_equal(&back->source, &back->destination);
}

/* Claims the entry of the answers, with another port of the client where its own is in use. */
static __always_inline enum verdict open_way_back(const struct settings *settings,
						  const struct tuple *asked,
						  struct scratch *arrival)
{
	long failed = asks_itself(&arrival->back) ? -EEXIST
						  : flow_claim(&arrival->back, &arrival->flow);
	struct flow *taken;

	if (!failed)
		return VERDICT_TRANSLATED;
	if (failed != -EEXIST)
		return VERDICT_FLOWS_FULL;
	taken = flow_find(&arrival->back);
	if (taken)
		arrival->other = open_asked(&arrival->back, taken);
	if (taken && way_is_free(taken, &arrival->other, asked)) {
		flow_end(&arrival->other);
		return flow_put(&arrival->back, &arrival->flow) ? VERDICT_FLOWS_FULL
								: VERDICT_TRANSLATED;
	}
	arrival->flow.other_port = asked->source_port;
	for (int i = 0; i < TRIES; i++) {
		arrival->back.destination_port = port_draw(settings);
		if (!flow_claim(&arrival->back, &arrival->flow))
			return VERDICT_PORT_CHANGED;
	}
	return VERDICT_PORTS_EXHAUSTED;
}

/* An entry that names no port yet: egress will choose; or none, where there was one before. */
static __always_inline bool open_masquerade(struct scratch *arrival)
{
	struct tuple *there = &arrival->other;
	struct flow *flow = &arrival->flow;

	*there = tuple_reverse(&arrival->back, HOOK_EGRESS);
	if (!(flow->flags & FLOW_MASQUERADE)) {
		if (flow_find(there))
			flow_end(there);
		return true;
	}
	flow->address = (struct address){};
	flow->port = 0;
	flow->other_port = 0;
	return !flow_put(there, flow);
}

static __always_inline bool open_way_there(const struct tuple *asked, struct scratch *arrival)
{
	struct flow *flow = &arrival->flow;
	__be16 port = arrival->back.destination_port;

	flow->address = arrival->backend.address;
	flow->port = arrival->backend.port;
	flow->other_port = port == asked->source_port ? 0 : port;
	return !flow_put(asked, flow);
}

/* Opens the flow to arrival->backend, masqueraded or not. Where it opens, the verdict is
 * VERDICT_TRANSLATED or VERDICT_PORT_CHANGED. */
static __always_inline enum verdict flow_open(const struct settings *settings,
					      const struct tuple *asked, __u32 ifindex,
					      bool masquerade, struct scratch *arrival)
{
	__u64 now = clock_coarse();
	const struct backend *backend = &arrival->backend;
	enum verdict verdict;

	arrival->flow = (struct flow){ .last_seen = now,
				       .created = now,
				       .address = asked->destination,
				       .port = asked->destination_port,
				       .service = backend->service,
				       .backend = backend->id,
				       .ifindex = ifindex };
	arrival->back = tuple_reverse(asked, HOOK_EGRESS);
	arrival->back.source = backend->address;
	arrival->back.source_port = backend->port;
	verdict = open_way_back(settings, asked, arrival);
	if (verdict == VERDICT_FLOWS_FULL || verdict == VERDICT_PORTS_EXHAUSTED)
		return verdict;
	arrival->flow.flags = FLOW_REQUEST | (masquerade ? FLOW_MASQUERADE : 0) |
			      (asked->protocol == UDP ? FLOW_SEEN : 0);
	if (!open_masquerade(arrival) || !open_way_there(asked, arrival))
		return VERDICT_FLOWS_FULL;
	return verdict;
}

#endif
