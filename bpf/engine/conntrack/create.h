/* SPDX-License-Identifier: GPL-2.0 */
/* Making an entry in the kernel's conntrack, with its translation. */
#ifndef EBPFLB_ENGINE_CONNTRACK_CREATE_H
#define EBPFLB_ENGINE_CONNTRACK_CREATE_H

#include "engine/conntrack/entry.h"

/* CT_CLASH: another packet was first; CT_KNOWN: with the same flow. */
enum ct_made { CT_MADE, CT_CLASH, CT_KNOWN, CT_NO_SPACE };

#ifdef RECORD

/* It would be an entry in the node's own table: what it would be is all that is told. */
static __always_inline enum ct_made ct_create(struct __sk_buff *ctx, struct ct_key *key,
					      const struct address *to, __be16 port,
					      const struct address *from, __be16 *source_port)
{
	record_at(STEP_CONNTRACK_OPENS, port, from);
	return CT_MADE;
}

#else

static __always_inline struct nf_conn___init *ct_alloc(struct __sk_buff *ctx, struct ct_key *key)
{
	EMPTY(struct ct_options, options);

	options->netns_id = CURRENT_NETNS;
	options->protocol = key->protocol;
	return key->size == sizeof(key->tuple.ipv4)
		       ? bpf_skb_ct_alloc(ctx, &key->tuple, sizeof(key->tuple.ipv4), options, 12)
		       : bpf_skb_ct_alloc(ctx, &key->tuple, sizeof(key->tuple.ipv6), options, 12);
}

/*
 * An entry whose requests go to `to`, from `from`. The destination is set first: the source port is
 * chosen so that it is unique for that destination. Port 0 means that nf_nat chooses: the client's
 * own if it is free, else another one of its class. It becomes `source_port`.
 */
static __always_inline enum ct_made ct_create(struct __sk_buff *ctx, struct ct_key *key,
					      const struct address *to, __be16 port,
					      const struct address *from, __be16 *source_port)
{
	struct nf_conn___init *fresh = ct_alloc(ctx, key);
	struct address destination = ct_address(to), source = ct_address(from);
	struct nf_conn *entry;
	int failed;

	if (!fresh)
		return CT_NO_SPACE;
	bpf_ct_set_timeout(fresh, CT_TIMEOUT);
	failed = bpf_ct_set_nat_info(fresh, &destination, BE16(port), CT_DESTINATION);
	if (!failed)
		failed = bpf_ct_set_nat_info(fresh, &source, 0, CT_SOURCE);
	/* Only by inserting it can an entry be given up. */
	entry = bpf_ct_insert_entry(fresh);
	if (!entry)
		return CT_CLASH;
	*source_port = ct_reply_port(entry);
	if (failed)
		bpf_ct_change_timeout(entry, 0);
	bpf_ct_release(entry);
	return failed ? CT_NO_SPACE : CT_MADE;
}

#endif

#endif
