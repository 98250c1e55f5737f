/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Where the entry of a socket is: at the place that its cookie has in the array socket_places, or, if
 * another open socket has that place, in the hash `sockets`. The array takes a third of the hash's time.
 * Two sockets do not take one place at a time: a socket claims it by an atomic compare-and-exchange,
 * writes the entry, and puts its cookie there by another one. Each is a full barrier, on arm64 too: the
 * entry is written between them. Before Linux 5.12 there is none, and a lock instead. Either way a
 * reader has no barrier: it belongs to the socket, whose calls are ordered by the kernel, or to a
 * thread that races with the first datagram of another.
 */
#ifndef EBPFLB_SOCKETS_PLACE_H
#define EBPFLB_SOCKETS_PLACE_H

#include "maps.h"

static __always_inline struct sockets_full *sockets_full_counters(void)
{
	return ONLY_VALUE(struct sockets_full, sockets_full);
}

static __always_inline struct socket_place *socket_place(__u64 socket)
{
	return LOOKUP_NUMBER(struct socket_place, socket_places, socket % ENTRIES_socket_places);
}

/* The entry in the hash, if the socket's place was taken when it was remembered. */
static __always_inline struct socket_entry *socket_find_elsewhere(__u64 socket)
{
	return sockets_full_counters()->elsewhere ? LOOKUP(struct socket_entry, sockets, &socket)
						  : NULL;
}

/* The entry of the socket with this cookie, or NULL. */
static __always_inline struct socket_entry *socket_find(__u64 socket)
{
	struct socket_place *place = socket_place(socket);

	return place && place->socket == socket ? &place->entry : socket_find_elsewhere(socket);
}

/*
 * This bit of a cookie is inverted while the socket's entry is written; no cookie is so large. It stands
 * here because a line of bpf/layout/socket.h that is no comment empties the flow tables at an upgrade.
 */
#define PLACE_CLAIMED (1ULL << 62)

static __always_inline __u64 claim_of(__u64 socket)
{
	return socket ^ PLACE_CLAIMED;
}

/*
 * The second exchange cannot fail: nothing changes a place that is claimed. Other sockets expect 0
 * there, and release() of this socket its cookie; the agent only reads these maps, and a program
 * that has begun ends.
 */
static __always_inline long place_claim(struct socket_place *place, __u64 socket,
					const struct socket_entry *entry)
{
	__u64 claim = claim_of(socket), was = compare_exchange(&place->socket, 0, claim);

	if (was)
		return was == socket || was == claim ? -EEXIST : -EBUSY;
	place->entry = *entry;
	compare_exchange(&place->socket, claim, socket);
	return 0;
}

/*
 * Writes the entry if the place is free. -EEXIST: it is the socket's own; -EBUSY: another one's. Two
 * sockets may ask for one place at the same time.
 */
static __always_inline long place_take(struct socket_place *place, __u64 socket,
				       const struct socket_entry *entry)
{
	long result = -EBUSY;

	if (CAN_EXCHANGE)
		return place_claim(place, socket, entry);
	if (place->socket && place->socket != socket)
		return result;
	bpf_spin_lock((struct bpf_spin_lock *)&place->lock);
	if (!place->socket) {
		place->entry = *entry;
		place->socket = socket;
		result = 0;
	} else if (place->socket == socket) {
		result = -EEXIST;
	}
	bpf_spin_unlock((struct bpf_spin_lock *)&place->lock);
	return result;
}

/* The lock is for threads of the socket: another one takes no place that is not free. */
static __always_inline void place_replace(struct socket_place *place, __u64 socket,
					  const struct socket_entry *entry)
{
	bpf_spin_lock((struct bpf_spin_lock *)&place->lock);
	if (place->socket == socket)
		place->entry = *entry;
	bpf_spin_unlock((struct bpf_spin_lock *)&place->lock);
}

static __always_inline bool place_free(struct socket_place *place, __u64 socket)
{
	bool is_own;

	if (place->socket != socket)
		return false;
	if (CAN_EXCHANGE)
		return compare_exchange(&place->socket, socket, 0) == socket;
	bpf_spin_lock((struct bpf_spin_lock *)&place->lock);
	is_own = place->socket == socket;
	if (is_own)
		place->socket = 0;
	bpf_spin_unlock((struct bpf_spin_lock *)&place->lock);
	return is_own;
}

/* The hash is asked from before its first entry until after its last one. */
static __always_inline long elsewhere_insert(__u64 socket, const struct socket_entry *entry)
{
	struct sockets_full *counters = sockets_full_counters();
	long failed;

	__sync_fetch_and_add(&counters->elsewhere, 1);
	failed = bpf_map_update_elem(MAP(sockets), &socket, entry, BPF_NOEXIST);
	if (failed)
		__sync_fetch_and_add(&counters->elsewhere, -1);
	return failed;
}

static __always_inline bool elsewhere_delete(__u64 socket)
{
	struct sockets_full *counters = sockets_full_counters();

	if (!counters->elsewhere || bpf_map_delete_elem(MAP(sockets), &socket))
		return false;
	__sync_fetch_and_add(&counters->elsewhere, -1);
	return true;
}

/* Remembers a socket. -EEXIST: it is remembered already; another error: there is no room. */
static __always_inline long entry_insert(__u64 socket, const struct socket_entry *entry)
{
	struct socket_place *place = socket_place(socket);
	long result = -EBUSY;

	if (socket_find_elsewhere(socket))
		return -EEXIST;
	if (place)
		result = place_take(place, socket, entry);
	return result == -EBUSY ? elsewhere_insert(socket, entry) : result;
}

/* A socket that is remembered gets another entry. */
static __always_inline void entry_replace(__u64 socket, const struct socket_entry *entry)
{
	struct socket_place *place = socket_place(socket);

	if (place && place->socket == socket)
		place_replace(place, socket, entry);
	else
		bpf_map_update_elem(MAP(sockets), &socket, entry, BPF_ANY);
}

static __always_inline bool entry_delete(__u64 socket)
{
	struct socket_place *place = socket_place(socket);

	return (place && place_free(place, socket)) || elsewhere_delete(socket);
}

#endif
