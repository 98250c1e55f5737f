/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Whether conntrack has the port that the flow tables are about to give to a masqueraded flow: its
 * replies would go to the client of the flow tables. After a change of the engine, and beside a
 * kube-proxy, both have flows.
 */
#ifndef EBPFLB_ENGINE_CONNTRACK_PORT_H
#define EBPFLB_ENGINE_CONNTRACK_PORT_H

#include "engine/flows/source_port.h"
#include "path/tuple.h"

#define SKIPS 8	/* ports that are left out, at most */

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

/*
 * Leaves out ports of scratch->ports that conntrack has, until the next one is free there. Those
 * behind it are not asked about: what 6.1's verifier has to follow stays small.
 */
static __always_inline void ports_skip_conntrack(struct __sk_buff *ctx, struct scratch *scratch)
{
	struct port_sequence *ports = &scratch->ports;

	for (int i = 0; i < SKIPS; i++) {
		scratch->reply_tuple.destination_port = port_at(ports);
		if (!conntrack_has_port(ctx, &scratch->reply_tuple))
			return;
		port_next(ports);
	}
}

#else

static __always_inline bool conntrack_has_port(struct __sk_buff *ctx,
					       const struct tuple *reply_tuple)
{
	return false;
}

static __always_inline void ports_skip_conntrack(struct __sk_buff *ctx, struct scratch *scratch)
{
}

#endif
#endif
