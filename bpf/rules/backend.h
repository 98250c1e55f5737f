/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The backends of a service: its slots, which lie in one block. Picking one is one array look-up,
 * whatever the number of endpoints.
 *
 * Every slot names its service and its backend. So a program that was delayed between two look-ups
 * notices that the slots were given to another service meanwhile. The agent fills slots before it
 * writes the services that refer to them, and leaves them unchanged for a second afterwards.
 */
#ifndef EBPFLB_RULES_BACKEND_H
#define EBPFLB_RULES_BACKEND_H

#include "core/check.h"
#include "record/record.h"

/* Returns false if the slot belongs to another service, or is being written. */
static __always_inline bool backend_read(__u32 slot, __u32 service, struct backend *backend)
{
	struct backend *found = LOOKUP_NUMBER(struct backend, slots, slot);

	return found && COPY_CHECKED(backend, &slot, found) && backend->service == service;
}

/* Finds the backend with this id, if it still belongs to the service. */
static __always_inline bool backend_find(__u32 service, __u32 id, struct backend *backend)
{
	__u32 *slot = LOOKUP_NUMBER(__u32, backend_slots, id);

	return slot && backend_read(*slot, service, backend) && backend->id == id;
}

/*
 * Whether the backend with this id still serves the service: an id may have been given to another
 * service's backend meanwhile. Other than to read the backend this needs no check of the slot: one that
 * is being written names another pair before or after.
 */
static __always_inline bool backend_serves(__u32 service, __u32 id)
{
	__u32 *slot = LOOKUP_NUMBER(__u32, backend_slots, id);
	struct backend *found = slot ? LOOKUP_NUMBER(struct backend, slots, *slot) : NULL;

	return found && found->service == service && found->id == id;
}

#endif
