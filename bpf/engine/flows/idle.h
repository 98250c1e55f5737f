/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Since when a port allocated by this node has been held, and whether its flow has reached its
 * timeout. The agent's sweeps use the same timeouts, but ports also become free while no agent runs.
 */
#ifndef EBPFLB_ENGINE_FLOWS_IDLE_H
#define EBPFLB_ENGINE_FLOWS_IDLE_H

#include "core/settings.h"
#include "engine/flows/close.h"

#define PORT_IDLE 0		/* its flow has reached its timeout, or there is none */
#define PORT_KEPT (~0ULL)	/* it must not be taken */

/*
 * Returns the requests' entry of the flow whose reply is opening->reply_tuple, and writes the
 * requests' tuple to opening->ending.between. Returns NULL, and a tuple without a hook, if only the
 * reply's entry exists. `hook` is the reply's.
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

/* Returns when the flow with these entries was last used. request_entry may be NULL. */
static __always_inline __u64 flow_used(const struct flow *reply_entry,
				       const struct flow *request_entry)
{
	if (request_entry && request_entry->last_seen > reply_entry->last_seen)
		return request_entry->last_seen;
	return reply_entry->last_seen;
}

/*
 * Returns PORT_IDLE, PORT_KEPT, or, if another flow may take the port before the holder's timeout,
 * when the port's flow was last used. The port is in opening->reply_tuple, an entry of `hook`.
 * opening->holder_created distinguishes the holder from a later flow with the same port.
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
	/* Another CPU may be about to write the flow's other entries. */
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
