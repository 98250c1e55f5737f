/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Session affinity ClientIP: a client stays on its backend while that is in the list in use and
 * no more than the time-out has passed since its last new flow (kube-proxy.md 9).
 */
#ifndef EBPFLB_PATH_AFFINITY_H
#define EBPFLB_PATH_AFFINITY_H

#include "path/backend.h"

#define SECOND 1000000000ULL

static __always_inline bool affinity_find(const struct affinity_key *client,
					  const struct service *service, __u16 list,
					  struct backend *backend)
{
	struct affinity *entry = LOOKUP(struct affinity, affinity, client);
	__u64 now = bpf_ktime_get_ns();

	/* A sum: another CPU may have used the entry after we read the clock. */
	if (!entry || now > entry->last_used + service->affinity_seconds * SECOND)
		return false;
	if (!backend_find(service->id, entry->backend, backend) || !(backend->flags & list))
		return false;
	entry->last_used = now;
	return true;
}

static __always_inline void affinity_remember(const struct affinity_key *client, __u32 backend)
{
	struct affinity entry = { .last_used = bpf_ktime_get_ns(), .backend = backend };

	bpf_map_update_elem(MAP(affinity), client, &entry, 0);
}

#endif
