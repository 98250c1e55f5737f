/* SPDX-License-Identifier: GPL-2.0 */
/*
 * With --endpoint-health: whether the TCP connections of the packet path open, on both engines.
 *
 *   the first SYN at ingress         is remembered by its tuple, with the backend that it got
 *   a second one, half a second later    that backend has failed to answer
 *   a RST to the client at egress    that backend has refused
 *   a SYN-ACK to the client          that backend has answered
 *   a mere ACK to the client         the SYN was in a connection that is open already: it says nothing
 *
 * The reply's tuple is the SYN's reversed: at egress netfilter has translated it back already, and the
 * flow tables do just before. A client is an address. Of one outside of the cluster and IPv6 only the
 * upper 64 bits count, because one machine has all the others.
 */
#ifndef EBPFLB_PATH_ATTEMPT_H
#define EBPFLB_PATH_ATTEMPT_H

#include "core/endpoint_health.h"
#include "core/tuple.h"
#include "engine/flows/gate.h"
#include "engine/netfilter/choose.h"
#include "net/packet.h"

#define REPEATS_AFTER (SECOND / 2)	/* a client sends its second SYN after a second */
#define FORGOTTEN_AFTER (130 * SECOND)	/* it sends its last one after 127 seconds (Linux) */
#define TCP_OFFSET 12	/* where the TCP header has its length; its flags follow */
#define OF_PACKETS (1ULL << 63)		/* a client that is no network namespace */

static __always_inline __u64 packet_client(const struct address *source, bool is_local)
{
	__u64 mixed = mix_step(secret_read(), (__u64)source->word[0] << 32 | source->word[1]);

	if (is_local || address_is_v4(source))
		mixed = mix_step(mixed, (__u64)source->word[2] << 32 | source->word[3]);
	return mixed | OF_PACKETS;
}

static __always_inline struct service_client client_in(const struct attempt *attempt)
{
	return (struct service_client){ .client = attempt->client, .service = attempt->service };
}

static __always_inline struct attempt *attempt_find(const struct tuple *tuple)
{
	return LOOKUP(struct attempt, attempts, tuple);
}

/* A SYN at ingress, before it is handled: whether it is the second one of an attempt without answer. */
static __always_inline void attempt_repeat(const struct packet *packet)
{
	struct service_client client;
	struct attempt *attempt;
	__u64 waited;

	if (!packet->opens || !packet->control || !attempts_are_noted())
		return;
	attempt = attempt_find(&packet->tuple);
	if (!attempt || attempt->has_failed)
		return;
	waited = bpf_ktime_get_ns() - attempt->since;
	if (waited < REPEATS_AFTER || waited > FORGOTTEN_AFTER)
		return;
	attempt->has_failed = true;
	client = client_in(attempt);
	endpoint_failed(&client, attempt->backend);
}

/* A SYN at ingress that got a backend. That of a later one does not count: the first decides. */
static __always_inline void attempt_begin(const struct packet *packet,
					  const struct selection *selection)
{
	struct attempt *attempt, made = { .service = selection->service.id,
					  .backend = selection->backend.id };

	if (!packet->control || !attempts_are_noted() ||
	    settings_read()->flags & SETTING_ATTACHING)	/* answers would not be seen */
		return;
	made.client = packet_client(&packet->tuple.source, selection->is_local_client);
	made.since = bpf_ktime_get_ns();
	attempt = attempt_find(&packet->tuple);
	if (!attempt || made.since - attempt->since > FORGOTTEN_AFTER)
		bpf_map_update_elem(MAP(attempts), &packet->tuple, &made, BPF_ANY);
}

/* Whether a segment to the client with these flags answers its SYN. */
static __always_inline bool attempt_ends(__u8 flags)
{
	return flags & (TCP_SYN | TCP_RST) && !tcp_opens(flags);
}

/* A reply that leaves for the client, with its final tuple. */
static __always_inline void attempt_end(const struct tuple *reply, __u8 flags)
{
	struct tuple request = tuple_reverse(reply, HOOK_INGRESS);
	struct attempt *attempt = attempt_find(&request);
	struct service_client client;

	if (!attempt)
		return;
	client = client_in(attempt);
	if (!(flags & TCP_RST) && !attempt->has_failed)
		endpoint_opened(&client, attempt->backend);
	else if (!(flags & TCP_RST))
		service_reached(&client);	/* the flow tables may have drawn another backend */
	else if (!attempt->has_failed)
		endpoint_failed(&client, attempt->backend);
	bpf_map_delete_elem(MAP(attempts), &request);
}

/*
 * The backend has answered a SYN by an ACK without data: it has the connection already (RFC 5961 4.2).
 * Only the kernel's NAT has us choose for such a SYN; the flow tables know its flow.
 */
static __always_inline void attempt_forget(const struct tuple *reply)
{
	struct tuple request = tuple_reverse(reply, HOOK_INGRESS);

	if (netfilter_is_chosen(settings_read()) && attempt_find(&request))
		bpf_map_delete_elem(MAP(attempts), &request);
}

/* A packet at egress, before our programs translate it: netfilter has done so already. */
static __always_inline void attempt_answer(struct __sk_buff *ctx)
{
	__u32 tcp = LINK + (ctx->protocol == BE16(ETHERTYPE_IPV4) ? sizeof(struct ipv4)
								  : sizeof(struct ipv6));
	struct tuple reply = { .hook = HOOK_EGRESS };
	struct { __u8 offset, flags; } header;

	if (!attempts_are_noted() || !glance(ctx, &reply) || reply.protocol != TCP ||
	    bpf_skb_load_bytes(ctx, tcp + TCP_OFFSET, &header, sizeof(header)))
		return;
	if (attempt_ends(header.flags))
		attempt_end(&reply, header.flags);
	else if (ctx->len == tcp + (header.offset >> 4) * 4)
		attempt_forget(&reply);
}

#endif
