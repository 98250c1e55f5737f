/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Session affinity ClientIP (kube-proxy.md 9): a client keeps its backend while that is in the list
 * in use, and at most until the timeout after the client's last new flow.
 *
 * An entry ends at its timeout, when the backend leaves the list, or when the LRU evicts it. In the
 * first two cases affinity_find ignores the entry, and the client's next backend replaces it.
 *
 * The source of a packet may be forged, so clients without an answered flow are remembered in a map
 * of their own. That map serves the flows that they open meanwhile (kube-proxy also remembers a
 * client with its first packet), and a flood of forged sources evicts no client from the other map.
 * With the engine netfilter no program sees whether a flow was answered: its clients stay in that
 * map.
 */
#ifndef EBPFLB_RULES_AFFINITY_H
#define EBPFLB_RULES_AFFINITY_H

#include "core/client.h"
#include "rules/backend.h"

static __always_inline struct affinity_key affinity_key_of(const struct request *request,
							   const struct service *service)
{
	struct affinity_key key = { .netns = request->netns, .service = service->id };

	if (request->tuple)
		key.address = request->tuple->source;
	return key;
}

static __always_inline bool affinity_applies(struct affinity *entry,
					     const struct service *service, __u16 list,
					     struct backend *backend)
{
	__u64 now = bpf_ktime_get_ns();

	/* A sum, not a difference: another CPU may have used the entry after the clock was read. */
	if (!entry)
		return false;
	if (now > entry->last_used + service->affinity_seconds * SECOND) {
		record(STEP_AFFINITY_EXPIRED, entry->backend);
		return false;
	}
	if (!backend_find(service->id, entry->backend, backend) || !(backend->flags & list)) {
		record(STEP_AFFINITY_GONE, entry->backend);
		return false;
	}
	record(STEP_AFFINITY_USED, entry->backend);
	entry->last_used = now;
	return true;
}

/*
 * Whether a client has a backend of this list. The source of a packet may be known only in
 * new_affinity.
 */
static __always_inline bool affinity_find(const struct affinity_key *key, __u16 list,
					  bool from_packet, struct selection *selection)
{
	const struct service *service = &selection->service;
	struct affinity *entry;

	selection->is_pending = false;
	if (!service->affinity_seconds)
		return false;
	record(STEP_AFFINITY_ASKED, false);
	entry = LOOKUP(struct affinity, affinity, key);
	if (affinity_applies(entry, service, list, &selection->backend))
		return true;
	if (!from_packet)
		return false;
	selection->is_pending = true;
	record(STEP_AFFINITY_ASKED, true);
	entry = LOOKUP(struct affinity, new_affinity, key);
	OPAQUE(entry); /* as in engine/flows/table.h */
	return affinity_applies(entry, service, list, &selection->backend);
}

static __always_inline void affinity_remember(const struct affinity_key *key, __u32 backend,
					      bool pending)
{
	struct affinity entry = { .last_used = bpf_ktime_get_ns(), .backend = backend };
	long failed;

	record(STEP_AFFINITY_REMEMBERED, pending);
	if (!pending) {
		bpf_map_update_elem(MAP(affinity), key, &entry, BPF_ANY);
		return;
	}
	failed = bpf_map_update_elem(MAP(new_affinity), key, &entry, BPF_ANY);
	OPAQUE(failed);
}

/*
 * Confirms a client's affinity. Call it when the other end of the client's flow has been answered;
 * `opened` is when the flow was opened.
 */
static __always_inline void affinity_confirm(const struct address *client, __u32 service,
					     __u32 backend, __u64 opened)
{
	struct affinity_key key = { .address = *client, .service = service };
	struct affinity entry = { .last_used = opened, .backend = backend };

	bpf_map_update_elem(MAP(affinity), &key, &entry, BPF_ANY);
}

#endif
