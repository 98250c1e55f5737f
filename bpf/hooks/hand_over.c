/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Hands a request to the node that has its endpoint, by that node's MAC address (docs/client-addresses.md).
 * Attached to the uplink at ingress before hooks/packet.c, only with --hand-over. What is not handed over
 * goes on unchanged: to endpoints of this node, frames that another node has sent or handed over, and
 * frames for another host, which a switch has flooded. Other nodes' tests are answered.
 *
 *   plain segments and datagrams       by their tuple
 *   SYNs, packets with IP options      the same, read whole
 *   fragments                          follow the first one
 *   ICMP errors                        follow the flow that they quote
 *   pings                              go to a node that has endpoints of the address
 */
#include "compat.h"
#include "core/counters.h"
#include "core/scratch.h"
#include "maps.h"
#include "path/hand_over.h"
#include "path/leg_test.h"
#include "record/event_packet.h"

#define GO_ON -1	/* TC_ACT_UNSPEC, TCX_NEXT: the next program runs */
#define REDIRECTED 7	/* TC_ACT_REDIRECT */

/* Sends the packet to the hop; `begun` as in hooks/packet.c. */
static __always_inline int hand_over_to(struct __sk_buff *ctx, __u64 mac, const struct tuple *tuple,
					bool v6, __u64 begun)
{
	const struct hop *hop = hop_find(ctx, mac, v6);
	struct scratch *scratch;

	if (!hop || !hand_to(ctx, hop, mac, v6))
		return GO_ON;
#ifdef MONITOR
	scratch = scratch_here();
	if (scratch) {
		scratch->packet.tuple = *tuple;
		scratch->onward.known.kind = 0;
		scratch->opening.selection.backend = (struct backend){ .address = hop->address };
		monitor_packet(ctx, scratch, EVENT_INGRESS, begun, VERDICT_HANDED);
	}
#else
	(void)scratch;
#endif
	verdict_count(VERDICT_HANDED);
	return bpf_redirect(ctx->ifindex, 0);
}

/* A plain segment that opens nothing, or a datagram. */
static __always_inline int hand_over_plain(struct __sk_buff *ctx, const struct tuple *tuple,
					   __u64 begun)
{
	struct frontend frontend = tuple_frontend(tuple);
	struct handing to = { .tuple = tuple,
			      .v6 = ctx->protocol == BE16(ETHERTYPE_IPV6),
			      .remembers = true };
	struct scratch *scratch;

	to.frontend = handed_find(&frontend);
	if (!to.frontend || frame_is_from_node(ctx))
		return GO_ON;
	scratch = scratch_here();
	if (!scratch || !handing_find(ctx, &to, &frontend, &scratch->opening.selection.service))
		return GO_ON;
	return hand_over_to(ctx, to.node, tuple, to.v6, begun);
}

/* Remembers the node for the later fragments, which have no ports. */
static __always_inline void fragment_follows(const struct packet *packet, __u64 mac)
{
	struct handed_fragment value = { .seen = clock_coarse() };
	EMPTY(struct fragment_key, key);

	fragment_key_write(key, packet);
	__builtin_memcpy(value.mac, &mac, sizeof(mac));
	if (mac)
		bpf_map_update_elem(MAP(handed_fragments), key, &value, BPF_ANY);
	else
		bpf_map_delete_elem(MAP(handed_fragments), key);
}

static __always_inline __u64 fragment_node(const struct packet *packet)
{
	EMPTY(struct fragment_key, key);
	struct handed_fragment *found;

	fragment_key_write(key, packet);
	found = LOOKUP(struct handed_fragment, handed_fragments, key);
	return found && clock_coarse() <= found->seen + REASSEMBLY ? mac_in(found) : THIS_NODE;
}

/*
 * Reads the tuple of the request by which the packet finds its node, and the frontend. Returns false for
 * a packet that is never handed over.
 */
static __always_inline bool handed_read(struct __sk_buff *ctx, struct scratch *scratch,
					struct frontend *frontend, struct handing *to)
{
	struct packet *packet = &scratch->packet;
	struct related *related = &scratch->related;

	to->tuple = &packet->tuple;
	*frontend = (struct frontend){ .address = packet->tuple.destination, .protocol = ICMP };
	if (!packet_is_icmp(packet)) {
		if (packet->tuple.protocol == SCTP || packet_read_transport(ctx, packet) != READ)
			return false;
		*frontend = tuple_frontend(&packet->tuple);
		to->opens = packet->tuple.protocol == TCP && packet->opens;
		to->remembers = true;
		return true;
	}
	if (packet_is_echo(ctx, packet))	/* this node's own addresses are left to its kernel */
		return !LOOKUP(__u32, own_addresses, &packet->tuple.destination);
	if (!quote_read(ctx, packet, &related->quote) ||
	    !address_equal(&packet->tuple.destination, &related->quote.tuple.source))
		return false;
	tuple_write_reverse(&related->reply_tuple, &related->quote.tuple, HOOK_INGRESS);
	to->tuple = &related->reply_tuple;
	*frontend = tuple_frontend(to->tuple);
	return true;
}

static __always_inline int hand_over_read(struct __sk_buff *ctx, __u64 begun)
{
	struct scratch *scratch = scratch_begin(HOOK_INGRESS);
	struct frontend frontend = {};
	struct handing to = {};
	struct packet *packet;

	if (!scratch)
		return GO_ON;
	packet = &scratch->packet;
	if (packet_read_ip(ctx, packet) != READ)
		return GO_ON;
	to.v6 = packet->v6;
	if (packet->piece == LATER) {
		to.node = fragment_node(packet);
	} else {
		if (!handed_read(ctx, scratch, &frontend, &to))
			return GO_ON;
		to.frontend = handed_find(&frontend);
		if (!to.frontend || frame_is_from_node(ctx))
			return GO_ON;
		if (!handing_find(ctx, &to, &frontend, &scratch->opening.selection.service))
			to.node = THIS_NODE;
		if (packet->piece == FIRST)
			fragment_follows(packet, to.node);
	}
	if (!to.node || (packet->piece == LATER && frame_is_from_node(ctx)))
		return GO_ON;
	return hand_over_to(ctx, to.node, &packet->tuple, to.v6, begun);
}

static __always_inline int hand_over_likely(struct __sk_buff *ctx, __u64 begun)
{
	struct tuple tuple = { .hook = HOOK_INGRESS };
	int action;

	if (ctx->pkt_type || vlan_is_foreign(ctx))	/* not PACKET_HOST: for others, or for many */
		return GO_ON;
	if (glance(ctx, &tuple))
		return hand_over_plain(ctx, &tuple, begun);
	action = leg_test_answer(ctx);
	return action == LEG_UNANSWERED ? hand_over_read(ctx, begun) : action;
}

PROGRAM("tc/ingress")
int hand_over(struct __sk_buff *ctx)
{
	__u64 begun = monitor_time();

	return packet_may_be_handed(ctx) ? hand_over_likely(ctx, begun) : GO_ON;
}

LICENSE("GPL")
