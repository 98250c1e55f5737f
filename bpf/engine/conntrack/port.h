/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Whether conntrack has the port that the flow tables are about to give to a masqueraded flow: its
 * replies would go to the client of the flow tables. After a change of the engine, and beside a
 * kube-proxy, both have flows.
 */
#ifndef EBPFLB_ENGINE_CONNTRACK_PORT_H
#define EBPFLB_ENGINE_CONNTRACK_PORT_H

#include "path/tuple.h"

#ifdef HAVE_CONNTRACK

#include "engine/conntrack/entry.h"

/* By the tuple of the replies; an entry that is over counts too, as its port rests. */
static __always_inline bool conntrack_has_port(struct __sk_buff *ctx,
					       const struct tuple *reply_tuple)
{
	struct ct_options options = {};
	struct ct_key key;
	struct nf_conn *entry;

	if (reply_tuple->protocol == SCTP)
		return false;
	key = ct_key_of(reply_tuple);
	entry = ct_lookup(ctx, &key, &options);
	if (!entry)
		return false;
	bpf_ct_release(entry);
	return true;
}

#else

static __always_inline bool conntrack_has_port(struct __sk_buff *ctx,
					       const struct tuple *reply_tuple)
{
	return false;
}

#endif
#endif
