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

#include "path/policy.h"

#ifdef HAVE_CONNTRACK

#include "engine/conntrack/entry.h"
#include "path/route.h"

/*
 * Whether a rule in POSTROUTING may masquerade the flow, as CNIs do with what pods send to addresses
 * outside the pods' ranges. It does not apply to entries that are made here, so these flows are left
 * to the flow tables, whose packets such a rule sees.
 */
static __always_inline bool others_may_masquerade(const struct settings *settings,
						  const struct selection *selection,
						  const struct address *client)
{
	const struct backend *backend = &selection->backend;

	if (backend->flags & BACKEND_HERE ||
	    (policy_detects_local(settings, client) && !selection->is_local_client))
		return false;
	return !prefix_has(&settings->pods_v4, &backend->address) &&
	       !prefix_has(&settings->pods_v6, &backend->address);
}

/* Whether a flow of the flow tables has the client's port at this source already. */
static __always_inline bool flows_use_source(const struct packet *packet,
					     const struct backend *backend,
					     const struct address *source)
{
	struct tuple un_snat_tuple = { .source = backend->address,
				       .destination = *source,
				       .source_port = backend->port,
				       .destination_port = packet->tuple.source_port,
				       .protocol = packet->tuple.protocol,
				       .hook = HOOK_INGRESS };

	return flow_find(&un_snat_tuple) != NULL;
}

/* Whether conntrack takes the flow; `source` is then what its requests come from. */
static __always_inline bool conntrack_takes(struct __sk_buff *ctx, const struct packet *packet,
					    const struct settings *settings,
					    const struct selection *selection,
					    struct address *source, bool *masquerade)
{
	const struct address *client = &packet->tuple.source;
	enum route_source found;

	if (!(settings->flags & SETTING_CONNTRACK) || packet->tuple.protocol == SCTP)
		return false;
	*source = *client;
	*masquerade = policy_needs_snat(settings, selection, client);
	if (!*masquerade)
		return !others_may_masquerade(settings, selection, client);
	found = route_source(ctx, packet, &selection->backend, source);
	*masquerade = found == ROUTE_SOURCE;
	if (found == ROUTE_HERE)
		return true;
	return *masquerade && !flows_use_source(packet, &selection->backend, source);
}

/* A clash is tried once more: its cause is another packet of the flow, or of its source port. */
static __always_inline enum verdict conntrack_create(struct __sk_buff *ctx,
						     const struct packet *packet,
						     const struct backend *backend,
						     const struct address *source, bool masquerade)
{
	struct ct_key key = ct_key_of(&packet->tuple);
	enum ct_made made = ct_create(ctx, &key, &backend->address, backend->port, source);

	if (made == CT_CLASH) {
		if (ct_find(ctx, &key).known)
			return VERDICT_ESTABLISHED;
		made = ct_create(ctx, &key, &backend->address, backend->port, source);
	}
	if (made == CT_MADE)
		return masquerade ? VERDICT_MASQUERADED : VERDICT_TRANSLATED;
	return made == CT_CLASH ? VERDICT_PORTS_EXHAUSTED : VERDICT_FLOWS_FULL;
}

/* The verdict on a packet whose flow conntrack takes; VERDICT_PASSED if it does not take it. */
static __always_inline enum verdict conntrack_open(struct __sk_buff *ctx,
						   const struct packet *packet,
						   const struct settings *settings,
						   const struct selection *selection)
{
	struct address source;
	bool masquerade;

	if (!conntrack_takes(ctx, packet, settings, selection, &source, &masquerade))
		return VERDICT_PASSED;
	return conntrack_create(ctx, packet, &selection->backend, &source, masquerade);
}

#else

static __always_inline enum verdict conntrack_open(struct __sk_buff *ctx,
						   const struct packet *packet,
						   const struct settings *settings,
						   const struct selection *selection)
{
	return VERDICT_PASSED;
}

#endif
#endif
