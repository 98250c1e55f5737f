/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Where the entry of a socket is: at the place that its cookie has in the array socket_places, or, if
 * another open socket has that place, in the hash `sockets`. The array takes a third of the hash's time. A
 * lock keeps two sockets from taking one place, because BPF has no atomic compare-and-exchange before
 * Linux 5.12.
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
 * Writes the entry if the place is free, or the socket's own and `replaces` is set. -EEXIST: it is the
 * socket's own; -EBUSY: another one's. Two sockets may ask for one place at the same time.
 */
static __always_inline long place_write(struct socket_place *place, __u64 socket,
					const struct socket_entry *entry, bool replaces)
{
	long result = -EBUSY;

	if (place->socket && place->socket != socket)
		return result;
	bpf_spin_lock((struct bpf_spin_lock *)&place->lock);
	if (!place->socket || (replaces && place->socket == socket)) {
		place->entry = *entry;
		place->socket = socket;
		result = 0;
	} else if (place->socket == socket) {
		result = -EEXIST;
	}
	bpf_spin_unlock((struct bpf_spin_lock *)&place->lock);
	return result;
}

static __always_inline bool place_free(struct socket_place *place, __u64 socket)
{
	bool is_own;

	if (place->socket != socket)
		return false;
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
		result = place_write(place, socket, entry, false);
	return result == -EBUSY ? elsewhere_insert(socket, entry) : result;
}

/* A socket that is remembered gets another entry. */
static __always_inline void entry_replace(__u64 socket, const struct socket_entry *entry)
{
	struct socket_place *place = socket_place(socket);

	if (place && place->socket == socket)
		place_write(place, socket, entry, true);
	else
		bpf_map_update_elem(MAP(sockets), &socket, entry, BPF_ANY);
}

static __always_inline bool entry_delete(__u64 socket)
{
	struct socket_place *place = socket_place(socket);

	return (place && place_free(place, socket)) || elsewhere_delete(socket);
}

#endif
