/* SPDX-License-Identifier: GPL-2.0 */
/*
 * With SETTING_REPLY_TO_DEVICE replies leave by the device where their requests came in, whatever
 * the routing rules say of the backend's address: they are un-DNATed as soon as they come in from
 * the backend, and redirected past routing, netfilter and conntrack; and so are ICMP errors about
 * the requests. Where the routes lead a reply to that device anyway, or its last hop is used up, it
 * is left to them. If it is too long for that device its sender is told, as the stack would do it.
 */
#ifndef EBPFLB_PATH_REPLY_PATH_H
#define EBPFLB_PATH_REPLY_PATH_H

#include "core/outcome.h"
#include "engine/flows/follow.h"
#include "net/hops.h"
#include "path/packet_route.h"

/*
 * The entry by which egress would un-DNAT this packet, from backend to client; scratch->known becomes
 * a copy of it.
 */
static __always_inline struct flow *reply_entry_of(const struct tuple *tuple,
						   struct scratch *scratch)
{
	struct flow *flow;

	scratch->reply_tuple = *tuple;
	scratch->reply_tuple.hook = HOOK_EGRESS;
	flow = flow_find(&scratch->reply_tuple);
	return flow && flow_copy(&scratch->known, &scratch->reply_tuple, flow) &&
		       scratch->known.kind == FLOW_UN_DNAT ? flow : NULL;
}

static __always_inline bool replies_go_to_device(void)
{
	struct settings *settings = settings_read();

	return settings && settings->flags & SETTING_REPLY_TO_DEVICE;
}

/* Whether a packet that came in, of this tuple by now, is to leave by a device that no route names. */
static __always_inline bool leads_elsewhere(struct __sk_buff *ctx, const struct packet *packet,
					    const struct tuple *tuple, __u32 ifindex)
{
	return ifindex != ctx->ifindex && hops_are_left(ctx, packet) &&
	       route_device(ctx, packet, tuple, ctx->ifindex, FORWARDED) != ifindex;
}

/*
 * Whether a reply, of this tuple from backend to client, has to leave by another device than the one
 * to which it is routed. Then it is un-DNATed, and scratch->device is set; or scratch->mtu, if it is
 * too long for that device. A packet without a link header cannot be redirected.
 */
static __always_inline bool reply_leads_to_device(struct __sk_buff *ctx, struct scratch *scratch,
						  struct tuple *tuple)
{
#ifdef NO_LINK_HEADER
	return false;
#else
	const struct packet *packet = &scratch->packet;
	struct flow *flow, *known = &scratch->known;

	if (!replies_go_to_device())
		return false;
	flow = reply_entry_of(tuple, scratch);
	if (!flow || !leads_elsewhere(ctx, packet, tuple, known->ifindex))
		return false;
	scratch->snat_tuple = flow_translate(&scratch->reply_tuple, known);
	if (!device_takes(ctx, scratch, &scratch->snat_tuple, known->ifindex))
		return false;
	flow_touch(known, flow, packet, &scratch->snat_tuple);
	*tuple = scratch->snat_tuple;
	scratch->device = known->ifindex;
	record_at(STEP_REPLY_DEVICE, known->ifindex, &known->address);
	return true;
#endif
}

/*
 * The same of an ICMP error from the backend, or a router before it, about a packet of the client.
 * `to` is the error between the hooks, `quoted` the packet that it quotes; both become what the client
 * knows.
 */
static __always_inline void error_lead_to_device(struct __sk_buff *ctx, struct scratch *scratch,
						 struct tuple *to, struct tuple *quoted)
{
#ifndef NO_LINK_HEADER
	struct tuple reply_tuple = tuple_reverse(quoted, HOOK_EGRESS);
	struct flow *known = &scratch->known;

	if (!replies_go_to_device() || !reply_entry_of(&reply_tuple, scratch) ||
	    !leads_elsewhere(ctx, &scratch->packet, to, known->ifindex))
		return;
	if (address_equal(&to->source, &quoted->destination))
		to->source = known->address;
	if (route_device(ctx, &scratch->packet, to, known->ifindex, BPF_FIB_LOOKUP_OUTPUT) !=
	    known->ifindex)
		return;
	scratch->snat_tuple = flow_translate(&scratch->reply_tuple, known);
	*quoted = tuple_reverse(&scratch->snat_tuple, 0);
	scratch->device = known->ifindex;
	record_at(STEP_REPLY_DEVICE, known->ifindex, &known->address);
#endif
}

#endif
