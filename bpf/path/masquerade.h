/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A flow that has to come back to this node gets an address of the device it leaves by, and a
 * source port that no other flow to its backend has: whoever inserts the way back first has it.
 */
#ifndef EBPFLB_PATH_MASQUERADE_H
#define EBPFLB_PATH_MASQUERADE_H

#include "path/flow_open.h"

static __always_inline struct address masquerade_address(__u32 ifindex, bool v6)
{
	struct device *device = LOOKUP(struct device, devices, &ifindex);

	if (!device)
		return (struct address){};
	return v6 ? device->v6 : device->v4;
}

/*
 * Whether both sides of the flow that has a source port are done with it. A late packet of theirs
 * is out of the window of the next flow, and a new SYN of ours in that of the backend.
 */
static __always_inline bool masquerade_is_over(const struct tuple *back)
{
	struct flow *answers = flow_find(back);
	struct flow *requests;
	struct tuple there;

	if (!answers)
		return true;
	there = tuple_reverse(back, HOOK_EGRESS);
	there.source = answers->address;
	there.source_port = answers->port;
	requests = flow_find(&there);
	return !requests || flow_is_done(answers->flags, requests->flags);
}

/* Claims a source port: afterwards back is the tuple of the answers. */
static __always_inline bool masquerade_claim(const struct settings *settings,
					     const struct tuple *there, struct tuple *back,
					     const struct flow *flow)
{
	struct flow entry = { .last_seen = flow->last_seen,
			      .created = flow->created,
			      .address = there->source,
			      .port = there->source_port,
			      .service = flow->service,
			      .backend = flow->backend,
			      .ifindex = flow->ifindex };

	for (int i = 0; i < TRIES; i++) {
		back->destination_port = port_draw(settings);
		if (!flow_claim(back, &entry))
			return true;
		if (masquerade_is_over(back))
			return !flow_put(back, &entry);
	}
	return false;
}

/*
 * Chooses for an entry that names no port yet, writes it, and says what the packet becomes. Two
 * packets of a flow may come here at once; then the later one gives its port back.
 */
static __always_inline enum verdict masquerade(struct __sk_buff *ctx, const struct packet *packet,
					       const struct settings *settings, struct flow *flow,
					       struct tuple *to)
{
	struct address address = masquerade_address(ctx->ifindex, packet->v6);
	struct tuple back = tuple_reverse(&packet->tuple, HOOK_INGRESS);
	struct flow entry = *flow;

	back.destination = address;
	if (address_is_any(&address) || !masquerade_claim(settings, &packet->tuple, &back, flow))
		return VERDICT_PORTS_EXHAUSTED;
	flow = flow_find(&packet->tuple);
	if (flow && flow->port) {
		flow_end(&back);
		*to = flow_translate(&packet->tuple, flow);
		return VERDICT_ESTABLISHED;
	}
	entry.address = address;
	entry.port = back.destination_port;
	*to = flow_translate(&packet->tuple, &entry);
	return flow_update(&packet->tuple, &entry, BPF_EXIST) ? VERDICT_FLOWS_FULL
							      : VERDICT_MASQUERADED;
}

#endif
