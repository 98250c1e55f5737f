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
	EMPTY(struct ct_options, options);
	EMPTY(struct ct_key, key);
	struct nf_conn *entry;

	if (reply_tuple->protocol == SCTP)
		return false;
	ct_key_write(key, reply_tuple);
	entry = ct_lookup(ctx, key, options);
	if (!entry)
		return false;
	bpf_ct_release(entry);
	return true;
}

/*
 * Leaves out ports of scratch->ports that conntrack has, until the next one is free there. That is
 * scratch->port_asked, and mostly the one that the flow gets. Those behind it are not asked about:
 * what 6.1's verifier has to follow stays small.
 */
static __always_inline void ports_skip_conntrack(struct __sk_buff *ctx, struct scratch *scratch)
{
	struct port_sequence *ports = &scratch->ports;

	for (int i = 0; i < SKIPS; i++) {
		scratch->reply_tuple.destination_port = port_at(ports);
		if (!conntrack_has_port(ctx, &scratch->reply_tuple)) {
			scratch->port_asked = scratch->reply_tuple.destination_port;
			return;
		}
		port_next(ports);
	}
	scratch->port_asked = 0;
}

/*
 * Of the port that was found, whose entry has been created. That conntrack had it not when it was
 * asked before is enough, unless it opens flows too: then it may have got it meanwhile, and looks
 * for our entry after it has made its own (engine/conntrack/open.h), so one notices the other.
 *
 * There is no branch, since the verifier would follow both ways: conntrack finds nothing for
 * protocol 0, and does not look for it.
 */
static __always_inline bool conntrack_has_found(struct __sk_buff *ctx,
						const struct settings *settings,
						struct scratch *scratch)
{
	__u64 differ = (settings->flags & SETTING_CONNTRACK) |
		       (scratch->reply_tuple.destination_port ^ scratch->port_asked);
	__u8 protocol = scratch->reply_tuple.protocol;
	bool has;

	OPAQUE(differ);
	scratch->reply_tuple.protocol = protocol * ((differ | -differ) >> 63);
	has = conntrack_has_port(ctx, &scratch->reply_tuple);
	scratch->reply_tuple.protocol = protocol;
	return has;
}

#else

static __always_inline bool conntrack_has_found(struct __sk_buff *ctx,
						const struct settings *settings,
						struct scratch *scratch)
{
	return false;
}

static __always_inline void ports_skip_conntrack(struct __sk_buff *ctx, struct scratch *scratch)
{
}

#endif
#endif
