/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Gives a flow a port that no other flow to its backend has: the CPU that first creates the reply's
 * entry gets the port. If all ports that are tried are in use, the flow takes over a port: one
 * whose flow has reached its timeout, or else the one that was not used for the longest time.
 */
#ifndef EBPFLB_ENGINE_FLOWS_PORT_H
#define EBPFLB_ENGINE_FLOWS_PORT_H

#include "core/check.h"
#include "core/settings.h"
#include "engine/flows/close.h"
#include "net/packet.h"

/*
 * Since when a port allocated by this node has been held, and whether its flow has reached its
 * timeout. The agent's sweeps use the same timeouts, but ports also become free while no agent runs.
 */

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

/*
 * The source ports that a flow may get if it is masqueraded, or if its client's port is in use.
 * Like in the kernel's NAT, a privileged port stays privileged (nf_nat_l4proto_unique_tuple in
 * net/netfilter/nf_nat_core.c). Ports from 1024 on are replaced by ports of the settings.
 */

#define PRIVILEGED 1024	/* ports below it are only for root's processes */
#define PORTS_WORD (__builtin_offsetof(struct tuple, source_port) / 4)

#define PORT_TRIES 16	/* the number of ports to try for a flow */

static __always_inline __u32 random_below(__u32 limit)
{
	return ((__u64)bpf_get_prandom_u32() * limit) >> 32;
}

/*
 * Returns the ports to try for one flow: they start at a random port and advance in steps of one
 * random size, so no port is tried twice before all have been tried. Like with --random-fully, by
 * which kube-proxy masquerades (kube-proxy.md 5), the ports cannot be predicted.
 */
static __always_inline struct port_sequence port_sequence_between(__u32 first, __u32 last)
{
	__u32 size = last - first + 1;

	return (struct port_sequence){ .first = first,
				   .size = size,
				   .next = random_below(size),
				   .step = 1 + random_below(size / PORT_TRIES) };
}

static __always_inline struct port_sequence port_sequence_for(const struct settings *settings,
						      __be16 client_port)
{
	__u32 port = host16(client_port);

	if (port < 512)
		return port_sequence_between(1, 511);
	if (port < PRIVILEGED)
		return port_sequence_between(600, 1023);
	return port_sequence_between(settings->first_port, settings->last_port);
}

static __always_inline __be16 port_at(const struct port_sequence *ports)
{
	return BE16((__u16)(ports->first + ports->next));
}

static __always_inline __be16 port_next(struct port_sequence *ports)
{
	__be16 port = port_at(ports);

	ports->next = (ports->next + ports->step) % ports->size;
	return port;
}

/* Returns the part of an entry's check that comes from the ports. */
static __always_inline __u64 ports_sum(const struct tuple *tuple)
{
	return check_sum((const word *)tuple + PORTS_WORD, 4, PORTS_WORD);
}

static __always_inline __u64 sum_without_ports(const struct tuple *tuple, const struct flow *flow)
{
	return CHECK_SUM(tuple, flow) - ports_sum(tuple);
}

/*
 * Gives a tuple another destination port, and its entry the matching check. `sum` is the entry's
 * sum without ports, computed only once, since the verifier follows every try of a port.
 */
static __always_inline void flow_name_port(struct tuple *tuple, struct flow *flow, __u64 sum,
					   __be16 port)
{
	tuple->destination_port = port;
	flow->check = check_of(sum + ports_sum(tuple));
}

enum port { PORT_FOUND, PORT_TAKEN, NO_PORT };

/*
 * Takes over the port of opening->reply_tuple, unless another flow has got it meanwhile. If two
 * CPUs want the same port, the one that creates the claim gets it.
 */
static __always_inline bool port_take(struct opening *opening)
{
	struct tuple *claim = &opening->claim;
	struct flow *reply_entry;
	bool taken = false;

	*claim = opening->reply_tuple;
	claim->hook = HOOK_CLAIM;
	if (flow_create(claim, &opening->reply_entry))
		return false;
	reply_entry = flow_find(&opening->reply_tuple);
	if (reply_entry && reply_entry->created == opening->oldest_created) {
		if (holder_find(reply_entry, opening, HOOK_INGRESS))
			flow_end(&opening->ending);
		flow_delete(&opening->reply_tuple);
		taken = !flow_create(&opening->reply_tuple, &opening->reply_entry);
	}
	flow_delete(claim);
	return taken;
}

/*
 * Creates the replies' entry of a masqueraded flow, opening->reply_entry, for one of
 * opening->ports, which becomes the destination port of opening->reply_tuple. `opening` holds the
 * values that the verifier does not need to track from one try to the next.
 */
static __always_inline enum port port_create(const struct settings *settings,
					     struct opening *opening)
{
	struct tuple *tuple = &opening->reply_tuple;
	__u64 sum = sum_without_ports(tuple, &opening->reply_entry), held_since;

	opening->oldest = PORT_KEPT;
	for (int i = 0; i < PORT_TRIES; i++) {
		flow_name_port(tuple, &opening->reply_entry, sum, port_next(&opening->ports));
		if (!flow_create_named(tuple, &opening->reply_entry))
			return PORT_FOUND;
		held_since = port_held_since(settings, opening, HOOK_INGRESS);
		if (held_since < opening->oldest) {
			opening->oldest = held_since;
			opening->oldest_created = opening->holder_created;
			opening->oldest_port = tuple->destination_port;
		}
		if (held_since == PORT_IDLE)
			break;
	}
	tuple->destination_port = opening->oldest_port;
	if (opening->oldest == PORT_KEPT || !port_take(opening))
		return NO_PORT;
	return opening->oldest == PORT_IDLE ? PORT_FOUND : PORT_TAKEN;
}

#endif
