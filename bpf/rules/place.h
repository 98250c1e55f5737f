/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Copies of the entries of the hash `services`, where a look-up touches two cache lines and calls nothing:
 * a frontend's is in one of the places that begin where its hash says. The hash `services` decides: it is
 * asked for what has no copy, since those places were taken, and for what is being written at this moment
 * (core/check.h). A secret is in the hash, since tenants choose addresses and ports.
 *
 * The agent writes the entry before its copy. So programs of this version find a former copy as long as an
 * older agent, which knows no copies, runs with them; what that no longer leads to is looked up again,
 * without copies (path/select_backend.h).
 */
#ifndef EBPFLB_RULES_PLACE_H
#define EBPFLB_RULES_PLACE_H

#include "core/counters.h"
#include "core/settings.h"
#include "core/tuple.h"

#define SERVICE_PROBES 6
#define NO_PLACE 0xffffffff	/* beyond the array */

/* Some of the places may be beyond the array. */
static __always_inline __u32 first_place(const struct frontend *frontend)
{
	const __u32 *word = frontend->address.word;
	__u64 mixed = secret_read();

	if (!address_is_v4(&frontend->address)) {
		mixed = mix_step(mixed, (__u64)word[0] << 32 | word[1]);
		mixed = mix_step(mixed, word[2]);
	}
	mixed = mix_step(mixed, (__u64)frontend->port << 48 | (__u64)frontend->protocol << 32 |
				word[3]);
	return (mixed >> 32) * settings_read()->service_places >> 32;
}

static __always_inline struct service_place *place_at(__u32 at)
{
	return LOOKUP_NUMBER(struct service_place, service_places, at);
}

/*
 * All places are looked at, since one that was freed may be before the frontend's. Sets `at` to the one
 * that has the copy.
 */
static __always_inline struct service *service_at_place(const struct frontend *frontend, __u32 *at)
{
	__u32 first = first_place(frontend);

	UNROLL
	for (int i = 0; i < SERVICE_PROBES; i++) {
		struct service_place *place = place_at(first + i);

		if (place && frontend_equal(&place->frontend, frontend)) {
			*at = first + i;
			return &place->service;
		}
	}
	return NULL;
}

/*
 * Expects the backend in a slot of the service's block, if it is one of the first. It is read in place:
 * before Linux 5.12 no program can index an array of its copy on the stack.
 */
static __always_inline void place_expect(__u32 at, __u64 slot)
{
	struct service_place *place = place_at(at);

	OPAQUE(slot);
	if (place && slot < FIRST_BACKENDS)
		backend_expect(place->service.backends[slot]);
}

#endif
