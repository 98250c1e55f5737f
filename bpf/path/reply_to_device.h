/* SPDX-License-Identifier: GPL-2.0 */
/*
 * With SETTING_REPLY_TO_DEVICE replies leave by the device where their requests came in, whatever
 * the routing rules say of the backend's address: they are un-DNATed as soon as they come in from
 * the backend, and redirected past routing, netfilter and conntrack; and so are ICMP errors about
 * the requests. Where the routes lead a reply to that device anyway, or its TTL is exhausted, it
 * is left to them. If it is too long for that device its sender is told, as the stack would do it.
 */
#ifndef EBPFLB_PATH_REPLY_TO_DEVICE_H
#define EBPFLB_PATH_REPLY_TO_DEVICE_H

#include "core/outcome.h"
#include "engine/flows/follow.h"
#include "net/hops.h"
#include "path/packet_route.h"

/*
 * The entry by which egress would un-DNAT this packet, from backend to client; onward->second becomes
 * a copy of it.
 */
static __always_inline struct flow *reply_entry_of(const struct tuple *tuple, struct onward *onward)
{
	struct flow *flow;

	onward->between = *tuple;
	onward->between.hook = HOOK_EGRESS;
	flow = flow_find(&onward->between);
	return flow && flow_copy(&onward->second, &onward->between, flow) &&
		       onward->second.kind == FLOW_UN_DNAT ? flow : NULL;
}

static __always_inline bool replies_go_to_device(void)
{
	return settings_read()->flags & SETTING_REPLY_TO_DEVICE;
}

/* Whether routing would send this packet, with its current tuple, elsewhere than to `ifindex`. */
static __always_inline bool leads_elsewhere(struct __sk_buff *ctx, const struct packet *packet,
					    const struct tuple *tuple, __u32 ifindex)
{
	return ifindex != ctx->ifindex && hops_are_left(ctx, packet->v6) &&
	       route_device(ctx, packet, tuple, ctx->ifindex, FORWARDED) != ifindex;
}

/*
 * Whether a reply, by now from backend to client (onward->to), has to leave by another device than the
 * one to which it is routed. Then it is un-DNATed, and onward->device is set; or onward->mtu, if it is
 * too long for that device. A packet without a link header cannot be redirected.
 */
static __always_inline bool reply_leads_to_device(struct __sk_buff *ctx,
						  const struct packet *packet,
						  struct onward *onward)
{
#ifdef NO_LINK_HEADER
	return false;
#else
	struct flow *flow, *entry = &onward->second;

	if (!replies_go_to_device())
		return false;
	flow = reply_entry_of(&onward->to, onward);
	if (!flow || !leads_elsewhere(ctx, packet, &onward->to, entry->ifindex))
		return false;
	onward->after = flow_translate(&onward->between, entry);
	if (!device_takes(ctx, packet, onward, &onward->after, entry->ifindex))
		return false;
	flow_touch(entry, flow, packet, &onward->after);
	onward->to = onward->after;
	onward->device = entry->ifindex;
	record_at(STEP_REPLY_DEVICE, entry->ifindex, &entry->address);
	return true;
#endif
}

/*
 * The same of an ICMP error from the backend, or a router before it, about a packet of the client.
 * onward->to is the error between the hooks, related->quoted the packet that it quotes; both become what
 * the client knows.
 */
static __always_inline void error_lead_to_device(struct __sk_buff *ctx,
						 const struct packet *packet,
						 struct onward *onward, struct related *related)
{
#ifndef NO_LINK_HEADER
	struct tuple *to = &onward->to, *quoted = &related->quoted;
	struct flow *entry = &onward->second;

	tuple_write_reverse(&related->reply_tuple, quoted, HOOK_EGRESS);
	if (!replies_go_to_device() || !reply_entry_of(&related->reply_tuple, onward) ||
	    !leads_elsewhere(ctx, packet, to, entry->ifindex))
		return;
	if (address_equal(&to->source, &quoted->destination))
		to->source = entry->address;
	if (route_device(ctx, packet, to, entry->ifindex, BPF_FIB_LOOKUP_OUTPUT) != entry->ifindex)
		return;
	onward->after = flow_translate(&onward->between, entry);
	tuple_write_reverse(quoted, &onward->after, 0);
	onward->device = entry->ifindex;
	record_at(STEP_REPLY_DEVICE, entry->ifindex, &entry->address);
#endif
}

#endif
