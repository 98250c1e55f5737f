/* SPDX-License-Identifier: GPL-2.0 */
/* Events of packets. */
#ifndef EBPFLB_RECORD_EVENT_PACKET_H
#define EBPFLB_RECORD_EVENT_PACKET_H

#include "record/event.h"

#ifdef MONITOR

/* Clears the notes about the previous packet. */
static __always_inline void event_packet_begin(struct scratch *scratch)
{
	scratch->onward.known.kind = 0;
	scratch->opening.selection.service.id = 0;
	scratch->opening.selection.backend = (struct backend){};
}

/*
 * Returns the entry by which the packet leaves: the second one if ingress did the work of
 * egress.
 */
static __always_inline const struct flow *event_entry(const struct onward *onward)
{
	return onward->device || onward->mtu ? &onward->second : &onward->known;
}

static __always_inline enum verdict event_packet(struct __sk_buff *ctx,
						 const struct scratch *scratch,
						 const enum event_hook hook, __u64 begun,
						 enum verdict verdict)
{
	const struct selection *selection = &scratch->opening.selection;
	const struct flow *known = event_entry(&scratch->onward);
	struct monitor *monitor = monitor_read();
	bool is_new = selection->service.id || !known->kind;
	struct event *event;

	if (!monitor || !event_is_wanted(monitor, verdict))
		return verdict;
	event = event_reserve();
	if (!event) {
		event_lost();
		return verdict;
	}
	event_begin(event, hook, verdict, begun, monitor);
	event->ifindex = ctx->ifindex;
	event->kind = is_new ? 0 : known->kind;
	event->tuple = scratch->packet.tuple;
	event->address = is_new ? selection->backend.address : known->address;
	event->port = is_new ? selection->backend.port : known->port;
	event->service = is_new ? selection->service.id : known->service;
	event->backend = is_new ? selection->backend.id : known->backend;
	event_end(event);
	return verdict;
}

#define monitor_packet_begin(scratch) event_packet_begin(scratch)
#define monitor_packet(ctx, scratch, hook, begun, verdict) \
	event_packet(ctx, scratch, hook, begun, verdict)

#else

#define monitor_packet_begin(scratch) ((void)0)
#define monitor_packet(ctx, scratch, hook, begun, verdict) (verdict)

#endif
#endif
