/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The engine that leaves flows to the kernel's conntrack: an entry is made with its translation, and
 * the packet goes on unchanged, so that netfilter sees it as it came, tracks it and translates it.
 *
 * Kernels without the functions for it (kfuncs.h) get a program that leaves every flow to the flow
 * tables.
 */
#ifndef EBPFLB_ENGINE_CONNTRACK_OPEN_H
#define EBPFLB_ENGINE_CONNTRACK_OPEN_H

#include "path/outcome.h"
#include "path/policy.h"

#ifdef HAVE_CONNTRACK

#include "engine/conntrack/create.h"
#include "engine/conntrack/evict.h"
#include "path/route.h"

/*
 * Whether conntrack takes the flow; `source` is then what its requests come from. Where connections
 * are counted the flow tables do, since no program is told when a flow of conntrack ends.
 */
static __always_inline bool conntrack_takes(struct __sk_buff *ctx, const struct packet *packet,
					    const struct settings *settings,
					    const struct selection *selection,
					    struct address *source, bool *masquerade)
{
	const struct address *client = &packet->tuple.source;
	enum route_source found;

	if (!(settings->flags & SETTING_CONNTRACK) || packet->tuple.protocol == SCTP ||
	    selection->service.flags & SERVICE_LEAST_CONNECTIONS)
		return false;
	*source = *client;
	*masquerade = policy_needs_snat(settings, selection, client);
	if (!*masquerade)
		return !others_may_masquerade(settings, selection, client);
	found = route_source(ctx, packet, &selection->backend, source);
	*masquerade = found == ROUTE_SOURCE;
	return found != ROUTE_UNKNOWN;
}

/*
 * A failure is tried once more: the cause of a clash is another packet of the flow, or of its source
 * port; where there is no space some is made.
 */
static __always_inline enum ct_made conntrack_create(struct __sk_buff *ctx,
						     const struct packet *packet,
						     const struct backend *backend,
						     const struct address *source,
						     __be16 *source_port)
{
	EMPTY(struct ct_key, key);
	enum ct_made made;

	ct_key_write(key, &packet->tuple);
	made = ct_create(ctx, key, &backend->address, backend->port, source, source_port);
	if (made == CT_CLASH && ct_find(ctx, key).known)
		return CT_KNOWN;
	if (made == CT_NO_SPACE)
		opening_evict(ctx);
	if (made != CT_MADE)
		made = ct_create(ctx, key, &backend->address, backend->port, source, source_port);
	return made;
}

static __always_inline enum verdict conntrack_verdict(enum ct_made made, bool masquerade)
{
	switch (made) {
	case CT_MADE:
		return masquerade ? VERDICT_MASQUERADED : VERDICT_TRANSLATED;
	case CT_KNOWN:
		return VERDICT_ESTABLISHED;
	case CT_CLASH:
		return VERDICT_PORTS_EXHAUSTED;
	default:
		return VERDICT_FLOWS_FULL;
	}
}

/*
 * Whether the flow tables have a flow with this source to the backend, of which nf_nat does not know:
 * its client would get the replies, or the backend would take both for one connection.
 */
static __always_inline bool flows_have_source(const struct packet *packet,
					      const struct backend *backend,
					      const struct address *source, __be16 source_port,
					      bool masquerade)
{
	struct tuple reply_tuple = { .source = backend->address,
				     .destination = *source,
				     .source_port = backend->port,
				     .destination_port = source_port,
				     .protocol = packet->tuple.protocol,
				     .hook = masquerade ? HOOK_INGRESS : HOOK_EGRESS };

	return flow_find(&reply_tuple) != NULL;
}

/* Undecided where conntrack does not take the flow: then it is one for the flow tables. */
static __always_inline struct outcome conntrack_open(struct __sk_buff *ctx,
						     const struct packet *packet,
						     const struct settings *settings,
						     const struct selection *selection)
{
	__be16 source_port = packet->tuple.source_port;
	struct address source;
	enum ct_made made;
	bool masquerade;

	if (!conntrack_takes(ctx, packet, settings, selection, &source, &masquerade))
		return undecided();
	made = conntrack_create(ctx, packet, &selection->backend, &source, &source_port);
	if (made == CT_MADE && flows_have_source(packet, &selection->backend, &source, source_port,
						 masquerade)) {
		ct_give_up(ctx, &packet->tuple);
		return undecided();
	}
	if (made == CT_MADE)
		opening_note(ctx, packet, selection);
	return unchanged(conntrack_verdict(made, masquerade));
}

/* To be called for every packet at egress. */
static __always_inline void conntrack_leaves(struct __sk_buff *ctx)
{
	opening_leaves(ctx);
}

#else

static __always_inline struct outcome conntrack_open(struct __sk_buff *ctx,
						     const struct packet *packet,
						     const struct settings *settings,
						     const struct selection *selection)
{
	return undecided();
}

static __always_inline void conntrack_leaves(struct __sk_buff *ctx)
{
}

#endif
#endif
