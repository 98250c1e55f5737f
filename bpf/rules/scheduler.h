/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Picks the slot that a new connection gets, from those that a client may choose from: by the
 * service's flags (layout/service.h), for sockets and packets alike, with a fixed number of
 * look-ups.
 */
#ifndef EBPFLB_RULES_SCHEDULER_H
#define EBPFLB_RULES_SCHEDULER_H

#include "core/client.h"
#include "record/record.h"

#define NO_SLOT 0xffffffff	/* beyond the array */

/*
 * The result of a draw: a place of the service's list, or of its table, and which of its two
 * slots.
 */
struct draw {
	__u32 place;
	__u32 rest;
};

/* Multiplies to map a number onto `places`; the lower half of the product is the rest. */
static __always_inline struct draw draw_of(__u32 number, __u32 places)
{
	__u64 product = (__u64)number * places;

	return (struct draw){ .place = product >> 32, .rest = product };
}

/*
 * Returns the list's next turn. It needs a lock: programs before 5.12 have no atomic fetch-and-add,
 * and two CPUs could take the same turn. The first turn is random, or else the first connections of
 * all nodes would go to the same backend.
 */
static __always_inline __u32 rotation_next(const __u32 *service, __u16 list, __u32 size)
{
	struct rotation *rotation = LOOKUP_NUMBER(struct rotation, rotations, *service);
	__u32 *turn, next, first = 1;

	if (!rotation)
		return 0;
	turn = list == BACKEND_LOCAL ? &rotation->local : &rotation->cluster;
	if (!*turn)
		first += draw_of(bpf_get_prandom_u32(), size).place;
	bpf_spin_lock((struct bpf_spin_lock *)&rotation->lock);
	next = *turn && *turn <= size ? *turn : first;
	*turn = next + 1;
	bpf_spin_unlock((struct bpf_spin_lock *)&rotation->lock);
	return next - 1;
}

/*
 * Returns 32 bits by which the backend is drawn. With SERVICE_BY_TUPLE and SERVICE_BY_CLIENT every
 * node draws the same, so the bits contain no secret. A socket that connects has no port yet: it
 * counts as any connection of its client, and with SERVICE_BY_CLIENT the client is its network
 * namespace, like with session affinity.
 */
static __always_inline __u32 scheduler_draw(const struct request *request, __u32 flags)
{
	if (flags & SERVICE_BY_CLIENT)
		return request->tuple ? address_mix(&request->tuple->source)
				      : number_mix(request->netns);
	if (!request->tuple)
		return bpf_get_prandom_u32();
	return tuple_hash(request->tuple, flags & SERVICE_BY_TUPLE ? 0 : secret_read());
}

/* Returns the start of the list's part of `choices`: the local list follows the cluster list. */
static __always_inline __u32 table_base(const struct range *table, __u16 list)
{
	return table->base + (list == BACKEND_LOCAL ? table->size : 0);
}

static __always_inline __u32 scheduler_slot_at(const struct service *service,
					       const struct range *range, __u16 list,
					       struct draw draw)
{
	__u32 at = table_base(&service->table, list) + draw.place;
	struct choice *choice;

	if (!service->table.size)
		return range->base + draw.place;
	choice = LOOKUP_NUMBER(struct choice, choices, at);
	if (!choice)
		return NO_SLOT;
	return draw.rest < choice->below ? choice->slot : choice->other;
}

/* The slot with the fewest connections for its backend's weight, of those compared so far. */
struct least {
	__u32 slot;
	__u16 weight;
	__s64 load;
};

/*
 * Takes the slot if its backend has fewer. The barrier keeps one branch: the compiler would make
 * one for each field, and the verifier would follow all of them.
 */
static __always_inline void least_compare(struct least *least, __u32 slot)
{
	struct backend *backend = LOOKUP_NUMBER(struct backend, slots, slot);
	struct backend_load *load;

	if (!backend)
		return;
	load = LOOKUP_NUMBER(struct backend_load, backend_loads, backend->id);
	if (!load)
		return;
	if ((__s64)(__s32)load->open * least->weight >= least->load * backend->weight)
		return;
	barrier();
	*least = (struct least){ .slot = slot, .weight = backend->weight, .load = (__s32)load->open };
}

/*
 * Lets a socket draw a slot directly if all backends have the same number of places in the table:
 * the slots are in the CPU's caches (docs/benchmarks.md). A branch would be followed twice.
 */
static __always_inline void table_spare(const struct request *request, struct service *service)
{
	if (!request->tuple)
		service->table.size *= !(service->flags & SERVICE_EVEN);
}

/* Of a list with at most so many backends all are compared, else so many that are drawn. */
#define COMPARED_BACKENDS 8

/*
 * Returns the slot whose backend has the fewest connections for its weight; of equal ones the first
 * drawn. A backend may be drawn twice, and each draw uses the mixed number of the one before.
 */
static __always_inline __u32 least_connections_slot(const struct service *service,
						    const struct range *range, __u16 list,
						    struct draw draw, __u32 size)
{
	struct least least = { .slot = scheduler_slot_at(service, range, list, draw),
			       .weight = 1, .load = 1LL << 40 }; /* more than any backend has */
	__u32 slot = least.slot, number = draw.rest;
	bool all = range->size <= COMPARED_BACKENDS;
	__u64 place = slot - range->base, below;

	least_compare(&least, slot);
	UNROLL
	for (__u32 i = 1; i < COMPARED_BACKENDS; i++) {
		if (all && i >= range->size)
			break;
		if (all) {
			below = ++place - range->size;
			OPAQUE(below);
			place &= (__s64)below >> 63; /* 0 after the last one, without a branch */
			slot = range->base + place;
		} else {
			number = number_mix(number);
			slot = scheduler_slot_at(service, range, list, draw_of(number, size));
		}
		least_compare(&least, slot);
	}
	return least.slot;
}

/* Returns the slot of the backend that a new connection gets. The list must not be empty. */
static __always_inline __u32 scheduler_slot(const struct request *request,
					    const struct service *service,
					    const struct range *range, __u16 list)
{
	__u32 size = service->table.size ? service->table.size : range->size, slot;
	struct draw draw = {};

	if (service->flags & SERVICE_ROUND_ROBIN && !request->in_middle)
		draw.place = rotation_next(&service->id, list, size);
	else
		draw = draw_of(scheduler_draw(request, service->flags), size);
	if (service->flags & SERVICE_LEAST_CONNECTIONS)
		slot = least_connections_slot(service, range, list, draw, size);
	else
		slot = scheduler_slot_at(service, range, list, draw);
	record(STEP_SLOT, slot);
	return slot;
}

#endif
