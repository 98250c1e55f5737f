/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The second question: which backend? One array look-up, whatever the number of endpoints.
 *
 * Every slot names its service. A reader that was asleep while its slots were given to another
 * service sees that, and asks again.
 */
#ifndef EBPFLB_PATH_BACKEND_H
#define EBPFLB_PATH_BACKEND_H

#include "maps.h"

static __always_inline bool backend_read(__u32 slot, __u32 service, struct backend *backend)
{
	struct backend *found = LOOKUP(struct backend, slots, &slot);

	if (!found)
		return false;
	*backend = *found;
	return backend->service == service;
}

/* The multiplication maps 32 bits drawn evenly onto the range, without a division. */
static __always_inline bool backend_pick(const struct service *service, const struct range *range,
					 __u32 draw, struct backend *backend)
{
	__u32 chosen = ((__u64)draw * range->size) >> 32;

	return backend_read(range->base + chosen, service->id, backend);
}

/* The backend with this id, if it still belongs to the service. */
static __always_inline bool backend_find(__u32 service, __u32 id, struct backend *backend)
{
	__u32 *slot = LOOKUP(__u32, members, &id);

	return slot && backend_read(*slot, service, backend) && backend->id == id;
}

#endif
