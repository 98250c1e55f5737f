/* SPDX-License-Identifier: GPL-2.0 */
/*
 * SNAT at egress (kube-proxy.md 5.1): a flow whose replies must come back to this node gets the
 * address that the route would choose as its source, and a source port that no other flow to its
 * backend has.
 */
#ifndef EBPFLB_ENGINE_FLOWS_MASQUERADE_H
#define EBPFLB_ENGINE_FLOWS_MASQUERADE_H

#include "core/outcome.h"
#include "core/settings.h"
#include "engine/flows/window.h"
#include "engine/flows/port.h"
#include "rules/route.h"

/* On success the destination of opening->reply_tuple is the new source of the flow. */
static __always_inline enum port un_snat_create(const struct settings *settings,
						const struct tuple *snat_tuple,
						const struct flow *snat,
						struct opening *opening)
{
	opening->reply_tuple = tuple_reverse(snat_tuple, HOOK_INGRESS);
	opening->reply_tuple.destination = opening->source;
	opening->reply_entry = (struct flow){ .last_seen = snat->last_seen,
					      .created = snat->created,
					      .address = snat_tuple->source,
					      .port = snat_tuple->source_port,
					      .other_port = snat_tuple->destination_port,
					      .service = snat->service,
					      .backend = snat->backend,
					      .kind = FLOW_UN_SNAT,
					      .ifindex = snat->ifindex };
	opening->ports = port_sequence_for(settings, snat_tuple->source_port);
	return port_create(settings, opening);
}

/*
 * Turns FLOW_SNAT_PENDING, of which onward->known is a copy, into FLOW_SNAT. Two packets of a flow may
 * come here at once on two CPUs: if the other one has written its entry by the time that this one has a
 * port, this one gives its port back and uses the other's. If both look before either writes, the later
 * write counts for the packets to come; the other port's un-SNAT entry leads to the same client, so the
 * reply to the one packet that has it arrives, and stays until it has been idle for its time.
 */
static __always_inline struct outcome masquerade(struct __sk_buff *ctx,
						 const struct packet *packet,
						 struct onward *onward, struct opening *opening)
{
	struct flow *snat = &onward->second, *other = &opening->other, *now;
	enum port port;

	*snat = onward->known;
	route_source_here(ctx, packet, &opening->source);
	if (address_is_any(&opening->source))
		return unchanged(VERDICT_PORTS_EXHAUSTED);
	port = un_snat_create(settings_read(), &packet->tuple, snat, opening);
	if (port == NO_PORT)
		return unchanged(VERDICT_PORTS_EXHAUSTED);
	now = flow_find(&packet->tuple);
	if (now && flow_copy(other, &packet->tuple, now) && other->kind == FLOW_SNAT) {
		flow_delete(&opening->reply_tuple);
		onward->to = flow_translate(&packet->tuple, other);
		return rewritten(VERDICT_ESTABLISHED);
	}
	snat->kind = FLOW_SNAT;
	snat->address = opening->source;
	snat->port = opening->reply_tuple.destination_port;
	side_begin(snat, packet);
	if (flow_update(&packet->tuple, snat, BPF_EXIST)) {	/* evicted, or deleted, meanwhile */
		flow_delete(&opening->reply_tuple);
		return unchanged(VERDICT_FLOWS_FULL);
	}
	onward->to = flow_translate(&packet->tuple, snat);
	return rewritten(port == PORT_TAKEN ? VERDICT_PORT_TAKEN_OVER : VERDICT_MASQUERADED);
}

#endif
