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
#include "engine/flows/association.h"
#include "engine/flows/port.h"
#include "engine/flows/source_port.h"
#include "rules/route.h"

/* On success the destination of scratch->reply_tuple is the new source of the flow. */
static __always_inline enum port un_snat_create(const struct settings *settings,
						const struct packet *packet,
						const struct flow *snat, struct scratch *scratch)
{
	const struct tuple *snat_tuple = &packet->tuple;

	scratch->reply_tuple = tuple_reverse(snat_tuple, HOOK_INGRESS);
	scratch->reply_tuple.destination = scratch->source;
	scratch->reply_entry = (struct flow){ .last_seen = snat->last_seen,
					      .created = snat->created,
					      .address = snat_tuple->source,
					      .port = snat_tuple->source_port,
					      .other_port = snat_tuple->destination_port,
					      .service = snat->service,
					      .backend = snat->backend,
					      .kind = FLOW_UN_SNAT,
					      .ifindex = snat->ifindex };
	scratch->ports = port_sequence_for(settings, snat_tuple->source_port);
	return port_create(settings, scratch);
}

/*
 * Turns FLOW_SNAT_PENDING into FLOW_SNAT. Two packets of a flow may come here at once on two CPUs: if
 * the other one has written its entry by the time that this one has a port, this one gives its port
 * back and uses the other's. If both look before either writes, the later write counts for the
 * packets to come; the other port's un-SNAT entry leads to the same client, so the reply to the one
 * packet that has it arrives, and stays until it has been idle for its time.
 */
static __always_inline struct outcome masquerade(struct __sk_buff *ctx,
						 const struct packet *packet,
						 const struct flow *pending, struct tuple *to)
{
	struct settings *settings = settings_read();
	struct scratch *scratch = scratch_here();
	struct flow snat = *pending;
	enum port port;
	struct flow *now;

	if (!settings || !scratch)
		return unchanged(VERDICT_PORTS_EXHAUSTED);
	route_source_here(ctx, packet, &scratch->source);
	if (address_is_any(&scratch->source))
		return unchanged(VERDICT_PORTS_EXHAUSTED);
	port = un_snat_create(settings, packet, &snat, scratch);
	if (port == NO_PORT)
		return unchanged(VERDICT_PORTS_EXHAUSTED);
	now = flow_find(&packet->tuple);
	if (now && flow_copy(&scratch->known, &packet->tuple, now) &&
	    scratch->known.kind == FLOW_SNAT) {
		flow_delete(&scratch->reply_tuple);
		*to = flow_translate(&packet->tuple, &scratch->known);
		return rewritten(VERDICT_ESTABLISHED);
	}
	snat.kind = FLOW_SNAT;
	snat.address = scratch->source;
	snat.port = scratch->reply_tuple.destination_port;
	side_begin(&snat, packet);
	if (flow_update(&packet->tuple, &snat, BPF_EXIST)) {	/* evicted, or deleted, meanwhile */
		flow_delete(&scratch->reply_tuple);
		return unchanged(VERDICT_FLOWS_FULL);
	}
	*to = flow_translate(&packet->tuple, &snat);
	return rewritten(port == PORT_TAKEN ? VERDICT_PORT_TAKEN_OVER : VERDICT_MASQUERADED);
}

#endif
