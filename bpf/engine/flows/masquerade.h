/* SPDX-License-Identifier: GPL-2.0 */
/*
 * SNAT at egress (kube-proxy.md 5.1): a flow whose replies must come back to this node gets an
 * address of the device by which it leaves, and a source port that no other flow to its backend
 * has. The CPU that creates the reply's entry first gets the port.
 */
#ifndef EBPFLB_ENGINE_FLOWS_MASQUERADE_H
#define EBPFLB_ENGINE_FLOWS_MASQUERADE_H

#include "engine/flows/table.h"
#include "path/outcome.h"
#include "path/settings.h"
#include "engine/flows/source_port.h"

static __always_inline struct address masquerade_address(__u32 ifindex, bool v6)
{
	struct device *device = LOOKUP(struct device, devices, &ifindex);

	if (!device)
		return (struct address){};
	return v6 ? device->v6 : device->v4;
}

/*
 * Whether a source port may be used again: both sides of its flow have closed, or one has reset.
 * Late packets of the old flow are then outside the window of the new one.
 */
static __always_inline bool source_port_is_free(const struct tuple *un_snat_tuple)
{
	struct flow *reply_entry = flow_find(un_snat_tuple);
	struct flow *request_entry;
	struct tuple snat_tuple;

	if (!reply_entry)
		return true;
	snat_tuple = tuple_reverse(un_snat_tuple, HOOK_EGRESS);
	snat_tuple.source = reply_entry->address;
	snat_tuple.source_port = reply_entry->port;
	request_entry = flow_find(&snat_tuple);
	return !request_entry || flow_has_ended(reply_entry->flags, request_entry->flags);
}

/* On success the destination port of un_snat_tuple is the source port of the flow. */
static __always_inline bool un_snat_create(const struct settings *settings,
					   const struct tuple *snat_tuple,
					   const struct flow *snat, struct tuple *un_snat_tuple)
{
	struct flow un_snat = { .last_seen = snat->last_seen,
				.created = snat->created,
				.address = snat_tuple->source,
				.port = snat_tuple->source_port,
				.other_port = snat_tuple->destination_port,
				.service = snat->service,
				.backend = snat->backend,
				.kind = FLOW_UN_SNAT,
				.ifindex = snat->ifindex };

	for (int i = 0; i < PORT_TRIES; i++) {
		un_snat_tuple->destination_port = source_port_random(settings);
		if (!flow_create(un_snat_tuple, &un_snat))
			return true;
		if (source_port_is_free(un_snat_tuple))
			return !flow_write(un_snat_tuple, &un_snat);
	}
	return false;
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
	struct address address = masquerade_address(ctx->ifindex, packet->v6);
	struct tuple un_snat_tuple = tuple_reverse(&packet->tuple, HOOK_INGRESS);
	struct flow snat = *pending;
	struct flow *now;

	un_snat_tuple.destination = address;
	if (!settings || address_is_any(&address) ||
	    !un_snat_create(settings, &packet->tuple, &snat, &un_snat_tuple))
		return unchanged(VERDICT_PORTS_EXHAUSTED);
	now = flow_find(&packet->tuple);
	if (now && now->kind == FLOW_SNAT) {
		flow_delete(&un_snat_tuple);
		*to = flow_translate(&packet->tuple, now);
		return rewritten(VERDICT_ESTABLISHED);
	}
	snat.kind = FLOW_SNAT;
	snat.address = address;
	snat.port = un_snat_tuple.destination_port;
	if (flow_update(&packet->tuple, &snat, BPF_EXIST))
		return unchanged(VERDICT_FLOWS_FULL);
	*to = flow_translate(&packet->tuple, &snat);
	return rewritten(VERDICT_MASQUERADED);
}

#endif
