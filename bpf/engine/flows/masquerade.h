/* SPDX-License-Identifier: GPL-2.0 */
/*
 * SNAT at egress (kube-proxy.md 5.1): a flow whose replies must come back to this node gets an
 * address of the device by which it leaves, and a source port that no other flow to its backend
 * has.
 */
#ifndef EBPFLB_ENGINE_FLOWS_MASQUERADE_H
#define EBPFLB_ENGINE_FLOWS_MASQUERADE_H

#include "engine/flows/port.h"
#include "path/outcome.h"
#include "path/settings.h"

static __always_inline struct address masquerade_address(__u32 ifindex, bool v6)
{
	struct device *device = LOOKUP(struct device, devices, &ifindex);

	if (!device)
		return (struct address){};
	return v6 ? device->v6 : device->v4;
}

/* On success the destination of scratch->reply_tuple is the new source of the flow. */
static __always_inline enum port un_snat_create(const struct settings *settings,
						const struct packet *packet,
						const struct flow *snat, struct address source,
						struct scratch *scratch)
{
	const struct tuple *snat_tuple = &packet->tuple;

	scratch->reply_tuple = tuple_reverse(snat_tuple, HOOK_INGRESS);
	scratch->reply_tuple.destination = source;
	scratch->reply_entry = (struct flow){ .last_seen = snat->last_seen,
					      .created = snat->created,
					      .address = snat_tuple->source,
					      .port = snat_tuple->source_port,
					      .other_port = snat_tuple->destination_port,
					      .service = snat->service,
					      .backend = snat->backend,
					      .kind = FLOW_UN_SNAT,
					      .ifindex = snat->ifindex };
	return port_create(settings, source_ports_for(settings, snat_tuple->source_port), scratch);
}

/*
 * Turns FLOW_SNAT_PENDING into FLOW_SNAT. Two packets of a flow may do so at once on two CPUs; then
 * the later one deletes its un-SNAT entry and uses the other's port.
 */
static __always_inline struct outcome masquerade(struct __sk_buff *ctx,
						 const struct packet *packet,
						 const struct flow *pending, struct tuple *to)
{
	struct settings *settings = settings_read();
	struct scratch *scratch = scratch_here();
	struct address source = masquerade_address(ctx->ifindex, packet->v6);
	struct flow snat = *pending;
	enum port port;
	struct flow *now;

	if (!settings || !scratch || address_is_any(&source))
		return unchanged(VERDICT_PORTS_EXHAUSTED);
	port = un_snat_create(settings, packet, &snat, source, scratch);
	if (port == NO_PORT)
		return unchanged(VERDICT_PORTS_EXHAUSTED);
	now = flow_find(&packet->tuple);
	if (now && now->kind == FLOW_SNAT) {
		flow_delete(&scratch->reply_tuple);
		*to = flow_translate(&packet->tuple, now);
		return rewritten(VERDICT_ESTABLISHED);
	}
	snat.kind = FLOW_SNAT;
	snat.address = source;
	snat.port = scratch->reply_tuple.destination_port;
	if (flow_update(&packet->tuple, &snat, BPF_EXIST))
		return unchanged(VERDICT_FLOWS_FULL);
	*to = flow_translate(&packet->tuple, &snat);
	return rewritten(port == PORT_TAKEN ? VERDICT_PORT_TAKEN_OVER : VERDICT_MASQUERADED);
}

#endif
