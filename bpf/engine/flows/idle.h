/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Since when a port has been held that this node chose, and whether its flow has been idle for its
 * time: by the timeouts of the agent's sweeps, so both agree. Ports come free without an agent too.
 */
#ifndef EBPFLB_ENGINE_FLOWS_IDLE_H
#define EBPFLB_ENGINE_FLOWS_IDLE_H

#include "core/settings.h"
#include "engine/flows/close.h"

#define PORT_IDLE 0		/* its flow has been idle for its time, or there is none */
#define PORT_KEPT (~0ULL)	/* it must not be taken */

/*
 * The entry of the requests of the flow that has the reply opening->reply_tuple, and their tuple in
 * opening->ending.between; NULL, and a tuple of no hook, if the reply's entry is alone. `hook` is
 * the reply's.
 */
static __always_inline struct flow *holder_find(const struct flow *reply_entry,
						struct opening *opening, const enum hook hook)
{
	const enum hook other = hook == HOOK_EGRESS ? HOOK_INGRESS : HOOK_EGRESS;
	struct tuple *request_tuple = &opening->ending.between;
	struct flow *request_entry;

	if (hook == HOOK_EGRESS) {
		request_tuple_write(request_tuple, &opening->reply_tuple, reply_entry);
	} else {
		tuple_write_reverse(request_tuple, &opening->reply_tuple, HOOK_EGRESS);
		request_tuple->source = reply_entry->address;
		request_tuple->source_port = reply_entry->port;
	}
	request_entry = flow_find(request_tuple);
	if (request_entry && reply_entry->kind != FLOW_RESTING &&
	    request_leads_to(request_tuple, request_entry, &opening->reply_tuple, other))
		return request_entry;
	request_tuple->hook = 0;
	return NULL;
}

/* When the flow was last used of which these are the entries; request_entry may be NULL. */
static __always_inline __u64 flow_used(const struct flow *reply_entry,
				       const struct flow *request_entry)
{
	if (request_entry && request_entry->last_seen > reply_entry->last_seen)
		return request_entry->last_seen;
	return reply_entry->last_seen;
}

/*
 * PORT_IDLE, PORT_KEPT, or when the flow that holds the port was last used, if another flow may
 * take the port before the holder's timeout. The port is in opening->reply_tuple, an entry of hook
 * `hook`. opening->holder_created tells the holder from a later flow with the same port.
 */
static __always_inline __u64 port_held_since(const struct settings *settings,
					     struct opening *opening, const enum hook hook)
{
	EMPTY(struct timeout_key, key);
	struct flow *reply_entry = flow_find(&opening->reply_tuple), *request_entry;
	__u64 now = clock_coarse(), used;
	struct timeout *timeout;

	key->protocol = opening->reply_tuple.protocol;
	if (!reply_entry)
		return PORT_IDLE;
	opening->holder_created = reply_entry->created;
	opening->holder_connection = reply_entry->connection;
	request_entry = holder_find(reply_entry, opening, hook);
	/* Its other entries may be about to be written, on another CPU. */
	if (!request_entry && now < reply_entry->created + SECOND)
		return PORT_KEPT;
	used = flow_used(reply_entry, request_entry);
	if (key->protocol == UDP)
		key->is_stream = used > reply_entry->created + settings->stream_after * SECOND;
	if (request_entry)
		key->request_flags = request_entry->flags & ~(FLOW_MASQUERADE | FLOW_GONE);
	key->reply_flags = reply_entry->flags;
	timeout = LOOKUP(struct timeout, timeouts, key);
	if (!timeout || now < used + timeout->kept * SECOND)
		return PORT_KEPT;
	return now < used + timeout->idle * SECOND ? used : PORT_IDLE;
}

#endif
