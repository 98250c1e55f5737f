/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Finds entries of the kernel's conntrack, and makes them. An entry has its translation from the
 * beginning: netfilter then translates the packets of both directions, at its usual places.
 */
#ifndef EBPFLB_ENGINE_CONNTRACK_ENTRY_H
#define EBPFLB_ENGINE_CONNTRACK_ENTRY_H

#include "engine/conntrack/kfuncs.h"
#include "net/address.h"
#include "net/protocol.h"
#include "record/record.h"

/*
 * Until netfilter has seen the packet, which sets the time-out of the protocol's state. So a packet
 * that is dropped before (in raw) leaves no entry.
 */
#define CT_TIMEOUT 1000	/* ms */

/* A tuple as the kernel's functions take it. */
struct ct_key {
	struct bpf_sock_tuple tuple;
	__u32 size;
	__u8 protocol;
};

/* Fills an empty key. An IPv4 address is the last 32 bits of ours. */
static __always_inline void ct_key_write(struct ct_key *key, const struct tuple *tuple)
{
	key->protocol = tuple->protocol;
	if (address_is_v4(&tuple->source)) {
		key->tuple.ipv4.saddr = tuple->source.word[3];
		key->tuple.ipv4.daddr = tuple->destination.word[3];
		key->tuple.ipv4.sport = tuple->source_port;
		key->tuple.ipv4.dport = tuple->destination_port;
		key->size = sizeof(key->tuple.ipv4);
	} else {
		__builtin_memcpy(key->tuple.ipv6.saddr, &tuple->source, 16);
		__builtin_memcpy(key->tuple.ipv6.daddr, &tuple->destination, 16);
		key->tuple.ipv6.sport = tuple->source_port;
		key->tuple.ipv6.dport = tuple->destination_port;
		key->size = sizeof(key->tuple.ipv6);
	}
}

/* What a caller has to know of an entry; entries themselves have to be released. */
struct ct_found {
	bool known;
	bool translated;	/* its destination */
	bool over;		/* of TCP: closed or in TIME_WAIT */
};

static __always_inline struct nf_conn *ct_lookup(struct __sk_buff *ctx, struct ct_key *key,
						 struct ct_options *options)
{
	options->netns_id = CURRENT_NETNS;
	options->protocol = key->protocol;
	return key->size == sizeof(key->tuple.ipv4)
		       ? bpf_skb_ct_lookup(ctx, &key->tuple, sizeof(key->tuple.ipv4), options, 12)
		       : bpf_skb_ct_lookup(ctx, &key->tuple, sizeof(key->tuple.ipv6), options, 12);
}

/*
 * An entry that is over expires here: nf_conntrack would replace it by one without translation when
 * the packet that is being handled comes to it. The next look-up takes the expired one away.
 */
static __always_inline struct ct_found ct_find(struct __sk_buff *ctx, struct ct_key *key)
{
	EMPTY(struct ct_options, options);
	struct nf_conn *entry = ct_lookup(ctx, key, options);
	struct ct_found found = {};
	__u8 state;

	if (!entry)
		return found;
	state = ct_tcp_state(entry);
	found.known = true;
	found.translated = ct_status(entry) & CT_STATUS_DST_NAT;
	found.over = key->protocol == TCP && options->direction == DIRECTION_ORIGINAL &&
		     (state == CT_TCP_TIME_WAIT || state == CT_TCP_CLOSE);
	if (found.over)
		bpf_ct_change_timeout(entry, 0);
	bpf_ct_release(entry);
	return found;
}

/* As union nf_inet_addr has it. */
static __always_inline struct address ct_address(const struct address *address)
{
	struct address plain = {};

	if (!address_is_v4(address))
		return *address;
	plain.word[0] = address->word[3];
	return plain;
}

#endif
