/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The backends of a service: its slots, which lie in one block. Picking one is one array look-up,
 * whatever the number of endpoints.
 *
 * Every slot names its service and its backend. A program that was delayed between two look-ups
 * notices that the slots were given to another service meanwhile.
 */
#ifndef EBPFLB_PATH_BACKEND_H
#define EBPFLB_PATH_BACKEND_H

#include "maps.h"

/* False if the slot belongs to another service. */
static __always_inline bool backend_read(__u32 slot, __u32 service, struct backend *backend)
{
	struct backend *found = LOOKUP(struct backend, slots, &slot);

	if (!found)
		return false;
	*backend = *found;
	return backend->service == service;
}

/* Maps a number, evenly spread over 32 bits, onto the range: a multiplication, no division. */
static __always_inline bool backend_pick(const struct service *service, const struct range *range,
					 __u32 number, struct backend *backend)
{
	__u32 index = ((__u64)number * range->size) >> 32;

	return backend_read(range->base + index, service->id, backend);
}

/* The backend with this id, if it still belongs to the service. */
static __always_inline bool backend_find(__u32 service, __u32 id, struct backend *backend)
{
	__u32 *slot = LOOKUP(__u32, backend_slots, &id);

	return slot && backend_read(*slot, service, backend) && backend->id == id;
}

#endif
