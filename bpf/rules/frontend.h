/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Which service has this frontend? (kube-proxy.md 4)
 *
 * A frontend is matched exactly. Only if there is none, and the address is this node's, a NodePort
 * is looked up. On loopback, frontends are served in the node's own namespace alone: a pod's
 * loopback is not the node's.
 */
#ifndef EBPFLB_RULES_FRONTEND_H
#define EBPFLB_RULES_FRONTEND_H

#include "core/check.h"
#include "core/counters.h"
#include "core/settings.h"
#include "core/tuple.h"
#include "net/address.h"
#include "net/header.h"
#include "record/record.h"

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

enum found { ABSENT, FOUND, RECYCLED };

#define FRONTEND_PLACES 1048576	/* bits of no_frontends; behind them is one for each port */

/* Whether it is the loopback of another namespace, or a packet's, which no frontend is for. */
static __always_inline bool address_is_foreign_loopback(const struct address *address, __u64 netns)
{
	return address_is_loopback(address) && (netns == NO_NETNS || !netns_is_host(netns));
}

static __always_inline bool node_serves(const struct address *address, __u64 netns)
{
	if (address_is_loopback(address))
		return !address_is_foreign_loopback(address, netns);
	return LOOKUP(__u32, node_addresses, address) != NULL;
}

/* Whether the bit of this number is set in no_frontends. */
static __always_inline bool no_frontend_at(__u32 bit)
{
	__u64 *word = LOOKUP_NUMBER(__u64, no_frontends, bit / 64);

	return word && *word >> bit % 64 & 1;
}

static __always_inline __u32 frontend_bit(const struct frontend *frontend)
{
	const __u32 *word = frontend->address.word;
	__u64 upper = (__u64)BE32(word[0]) << 32 | BE32(word[1]);
	__u64 lower = (__u64)BE32(word[2]) << 32 | BE32(word[3]);
	__u32 port = BE16(frontend->port);
	__u64 mixed = (upper ^ (port << 8 | frontend->protocol)) * 0x94d049bb133111ebULL ^ lower;

	return number_mix(mixed) % FRONTEND_PLACES;
}

/*
 * Whether a frontend, or a NodePort, may have this address, port and protocol; if not, no map has to
 * be asked. The agent clears a bit before it writes the first frontend with that bit, and sets it after
 * it has removed the last one (NoFrontends in ebpflb/kernel/map_writer.py).
 */
static __always_inline bool frontend_may_exist(const struct frontend *frontend)
{
	return !no_frontend_at(FRONTEND_PLACES + BE16(frontend->port)) ||
	       !no_frontend_at(frontend_bit(frontend));
}

static __always_inline struct frontend nodeport_of(const struct frontend *frontend)
{
	return (struct frontend){ .address = address_any(&frontend->address),
				  .port = frontend->port,
				  .protocol = frontend->protocol };
}

/* The address as a whole, for what is sent to no port of a service (path/vip.h). */
static __always_inline struct frontend whole_of(const struct address *address)
{
	return (struct frontend){ .address = *address, .protocol = ICMP };
}

/* Whether a packet to a port that no service has may be refused for its address. */
static __always_inline bool address_may_be_vip(const struct settings *settings,
					       const struct address *address)
{
	struct frontend whole;

	if (!(settings->flags & SETTING_UNKNOWN_PORTS))
		return false;
	whole = whole_of(address);
	return !no_frontend_at(frontend_bit(&whole));
}

/* Copies what a look-up has found; false if it is not, or no longer, this frontend's. */
static __always_inline bool service_take(const struct frontend *frontend, struct service *service,
					 const struct service *found)
{
	if (!COPY_CHECKED(service, frontend, found))
		return false;
	record_at(STEP_SERVICE, service->id, &frontend->address);
	return true;
}

/*
 * RECYCLED: the element was given to another frontend, or replaced, while it was copied. If `place` is
 * given, the copies are read before the hash, and it is set to the place where the copy was found.
 */
static __always_inline enum found service_read(const struct frontend *frontend,
					       struct service *service, __u32 *place)
{
	struct service *found = place ? service_at_place(frontend, place) : NULL;

	if (found && service_take(frontend, service, found))
		return FOUND;
	found = LOOKUP(struct service, services, frontend);
	if (!found)
		return ABSENT;
	return service_take(frontend, service, found) ? FOUND : RECYCLED;
}

static __always_inline enum found service_find(const struct frontend *frontend, __u64 netns,
					       struct service *service, __u32 *place)
{
	enum found found = ABSENT;

	if (address_is_foreign_loopback(&frontend->address, netns))
		return ABSENT;
	if (!address_is_any(&frontend->address))
		found = service_read(frontend, service, place);
	if (found == ABSENT && node_serves(&frontend->address, netns)) {
		struct frontend nodeport = nodeport_of(frontend);

		found = service_read(&nodeport, service, place);
	}
	return found;
}

#endif
