/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The packet hooks over the maps of store.h: packets of a conversation between a client and a
 * frontend, which this node forwards to a backend.
 */
#include "skb.h"

/* One end of a packet: the last 32 bits of its address, and its port. */
struct end {
	__u32 address, port;
};

/* A packet, which a hook may change; ``verdicts`` has a bit for each. */
struct segment {
	struct end source, destination;
	__u32 sequence, acknowledgment, flags, verdicts;
	int action, strange;
};

static void write_segment(const struct segment *segment, int v6, __u8 protocol)
{
	struct ipv4 ip4 = { .version_length = 0x45, .ttl = 64, .protocol = protocol,
			    .source = segment->source.address,
			    .destination = segment->destination.address };
	struct ipv6 ip6 = { .version_class_label = BE32(0x60000000), .hops = 64, .next = protocol,
			    .source = address_of(1, segment->source.address),
			    .destination = address_of(1, segment->destination.address) };
	struct transport head = { .source_port = segment->source.port,
				  .destination_port = segment->destination.port };
	__u32 size = protocol == TCP ? 20 : 8, at = LINK + (v6 ? sizeof(ip6) : sizeof(ip4));

	memset(bytes, 0, sizeof(bytes));
	ip4.total = htons(sizeof(ip4) + size);
	ip6.payload = htons(size);
	if (protocol == TCP) {
		head.sequence = htonl(segment->sequence);
		head.acknowledgment = htonl(segment->acknowledgment);
		head.offset = 5 << 4;
		head.flags = segment->flags;
		head.window = htons(60000);
	} else {
		head.sequence = htonl(8 << 16 | 0x1234);
	}
	memcpy(bytes + LINK, v6 ? (void *)&ip6 : (void *)&ip4, at - LINK);
	memcpy(bytes + at, &head, protocol == TCP ? sizeof(head) : 8);
	skb = (struct __sk_buff){ .len = at + size,
				  .protocol = htons(v6 ? ETHERTYPE_IPV6 : ETHERTYPE_IPV4) };
}

static void read_segment(struct segment *segment, int v6)
{
	__u32 at = LINK + (v6 ? sizeof(struct ipv6) : sizeof(struct ipv4));
	__be16 ports[2];

	memcpy(ports, bytes + at, sizeof(ports));
	segment->source.port = ports[0];
	segment->destination.port = ports[1];
	segment->strange = 0;
	if (v6) {
		struct address pair[2];

		memcpy(pair, bytes + LINK + IPV6_ADDRESSES, sizeof(pair));
		segment->strange = !address_is_plain(pair, 1) || !address_is_plain(pair + 1, 1);
		segment->source.address = pair[0].word[3];
		segment->destination.address = pair[1].word[3];
	} else {
		memcpy(&segment->source.address, bytes + LINK + IPV4_ADDRESSES, 4);
		memcpy(&segment->destination.address, bytes + LINK + IPV4_ADDRESSES + 4, 4);
	}
}

/* A packet comes in, or leaves having come in. One that a hook does not let go on stays as it was. */
static void pass(struct segment *segment, int hook, int v6, __u8 protocol)
{
	__u64 before[MOST_VERDICTS];

	write_segment(segment, v6, protocol);
	skb.ifindex = DEVICE;
	skb.ingress_ifindex = hook == HOOK_EGRESS ? OTHERS : 0;
	netns = 0;
	verdicts_keep(before);
	segment->action = hook == HOOK_EGRESS ? egress(&skb) : ingress(&skb);
	segment->verdicts = verdicts_since(before);
	if (segment->action == GO_ON)
		read_segment(segment, v6);
}

/*
 * A flow: ``backend`` and ``seen_as``, the client as the backend sees it, are of the last request.
 * Sequence numbers count what each side has sent.
 */
struct conversation {
	struct end client, frontend, backend, seen_as;
	__u32 v6, protocol, sent, received;
};

/* Egress looks up what ingress has noted, as the note is lost here: it must find nothing to do. */
static int is_as_it_came(const struct conversation *talk, const struct segment *segment)
{
	return segment->action == GO_ON &&
	       !memcmp(&segment->source, &talk->seen_as, sizeof(struct end)) &&
	       !memcmp(&segment->destination, &talk->backend, sizeof(struct end));
}

/* By the note egress knows what it need not look up: nothing is counted. */
static int is_left_alone(void)
{
	__u64 before[MOST_VERDICTS];

	verdicts_keep(before);
	return egress(&skb) == GO_ON && !verdicts_since(before);
}

/* Where a request leads: as ``outcome_of``. ESTABLISHED is no outcome of its own. */
static long long request(struct conversation *talk, __u32 flags)
{
	struct segment segment = { .source = talk->client, .destination = talk->frontend,
				   .sequence = talk->sent, .acknowledgment = talk->received,
				   .flags = flags };
	__u32 verdicts;
	int is_noted, is_looked_up;

	pass(&segment, HOOK_INGRESS, talk->v6, talk->protocol);
	is_noted = is_translated(&skb);
	is_looked_up = is_noted && !is_left_alone();
	verdicts = segment.verdicts;
	talk->backend = segment.destination;
	talk->seen_as = segment.source;
	if (!(verdicts & (1 << VERDICT_TRANSLATED | 1 << VERDICT_PORT_CHANGED |
			  1 << VERDICT_ESTABLISHED)) || segment.action != GO_ON)
		return verdict_outcome(verdicts);
	segment.flags = flags;
	pass(&segment, HOOK_EGRESS, talk->v6, talk->protocol);
	segment.strange |= is_looked_up || (is_noted && !is_as_it_came(talk, &segment));
	talk->seen_as = segment.source;
	if (segment.action != GO_ON)
		return verdict_outcome(segment.verdicts);
	return place_of_outcome(talk->v6, segment.strange, talk->backend.address,
				talk->backend.port);
}

/* Whether the backend's packet comes to the client from the frontend. */
static int reply(struct conversation *talk, __u32 flags)
{
	struct segment segment = { .source = talk->backend, .destination = talk->seen_as,
				   .sequence = talk->received, .acknowledgment = talk->sent,
				   .flags = flags };

	pass(&segment, HOOK_INGRESS, talk->v6, talk->protocol);
	if (segment.action != GO_ON)
		return 0;
	pass(&segment, HOOK_EGRESS, talk->v6, talk->protocol);
	return segment.action == GO_ON && !segment.strange &&
	       !memcmp(&segment.source, &talk->frontend, sizeof(struct end)) &&
	       !memcmp(&segment.destination, &talk->client, sizeof(struct end));
}

/* A new flow: where it leads. ``replied``: whether what comes back is right. */
long long talk_open(struct conversation *talk, int *replied)
{
	long long outcome = request(talk, SYN);

	talk->sent++;
	if (outcome < 0)
		return outcome;
	*replied = reply(talk, SYN | ACK);
	talk->received++;
	request(talk, ACK);
	return outcome;
}

/* A request and its reply. */
long long talk_on(struct conversation *talk, int *replied)
{
	long long outcome = request(talk, ACK);

	if (outcome >= 0)
		*replied = reply(talk, ACK);
	return outcome;
}

/* Both sides end it. */
void talk_close(struct conversation *talk)
{
	if (request(talk, FIN) < 0)
		return;
	talk->sent++;
	reply(talk, FIN);
	talk->received++;
	request(talk, ACK);
}

static const char *const OF_FLOWS[] = { "tcp_flows", "other_flows" };

/* First packets of flows, which leave no entries behind; every ``step``th, from ``first`` on. */
void talk_all(const struct conversation *talks, int count, int first, int step,
	      struct conversation *after, long long *outcomes)
{
	for (int i = first; i < count; i += step) {
		unsigned long long since = events;

		after[i] = talks[i];
		outcomes[i] = request(&after[i], SYN);
		for (int which = 0; which < 2; which++)
			map_forget(find_map(OF_FLOWS[which]), since);
	}
}
