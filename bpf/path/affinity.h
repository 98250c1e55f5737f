/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Session affinity ClientIP (kube-proxy.md 9): a client keeps its backend while that is in the
 * list in use, and no more than the timeout has passed since the client's last new flow.
 *
 * It is forgotten at its timeout, when the backend leaves the list, or when the LRU evicts the entry.
 * In the first two cases affinity_find ignores the entry, and the client's next backend replaces it.
 */
#ifndef EBPFLB_PATH_AFFINITY_H
#define EBPFLB_PATH_AFFINITY_H

#include "path/backend.h"
#include "path/client.h"

#define SECOND 1000000000ULL

static __always_inline struct affinity_key affinity_key_of(const struct request *request,
							   const struct service *service)
{
	struct affinity_key key = { .netns = request->netns, .service = service->id };

	if (request->tuple)
		key.address = request->tuple->source;
	return key;
}

static __always_inline bool affinity_find(const struct affinity_key *key,
					  const struct service *service, __u16 list,
					  struct backend *backend)
{
	struct affinity *entry = LOOKUP(struct affinity, affinity, key);
	__u64 now = bpf_ktime_get_ns();

	/* A sum: another CPU may have used the entry after the clock was read. */
	if (!entry || now > entry->last_used + service->affinity_seconds * SECOND)
		return false;
	if (!backend_find(service->id, entry->backend, backend) || !(backend->flags & list))
		return false;
	entry->last_used = now;
	return true;
}

static __always_inline void affinity_remember(const struct affinity_key *key, __u32 backend)
{
	struct affinity entry = { .last_used = bpf_ktime_get_ns(), .backend = backend };

	bpf_map_update_elem(MAP(affinity), key, &entry, 0);
}

#endif
