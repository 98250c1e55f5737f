/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The connections that a backend has, for services with SERVICE_LEAST_CONNECTIONS: the count equals
 * the number of elements in two maps that name the backend. The program that inserts an element
 * adds to its backend's count, and the program that deletes it subtracts. If several try to delete
 * it, only one succeeds. So each connection is counted once and ended once.
 *
 *   sockets      of stream sockets: written under the socket's lock, by connect(), and deleted by
 *                the next connect(), at the release, or for the agent (hooks/socket_end.c)
 *   connections  of datagram sockets, whose calls take no lock, and of packets: written and deleted
 *                on two CPUs at once, or deleted for the agent (hooks/connection_end.c), which ends
 *                connections that no table remembers, because an LRU evicted them or a sweep
 *                deleted them
 *
 * A backend does not inherit the count of a removed backend that had the same id.
 *
 * Before 5.12 programs cannot add to a number and read the result, but they do not need to.
 */
#ifndef EBPFLB_CORE_CONNECTION_H
#define EBPFLB_CORE_CONNECTION_H

#include "maps.h"

static __always_inline struct backend_load *load_of(__u32 backend)
{
	return LOOKUP_NUMBER(struct backend_load, backend_loads, backend);
}

#ifdef RECORD

/* `ebpflb explain` reads the node's own counts and begins no connection. */
static __always_inline void load_begin(struct backend_load *load, bool is_counted)
{
}

static __always_inline void load_end(__u32 backend, __u32 generation)
{
}

static __always_inline void connection_begin(const void *key, __u32 backend)
{
}

static __always_inline void connection_end(const void *key)
{
}

#else

/* Counts a connection, as uncounted if its map was full. */
static __always_inline void load_begin(struct backend_load *load, bool is_counted)
{
	__sync_fetch_and_add(is_counted ? &load->open : &load->uncounted, 1);
}

static __always_inline void load_end(__u32 backend, __u32 generation)
{
	struct backend_load *load = load_of(backend);

	if (load && load->generation == generation)
		__sync_fetch_and_add(&load->open, -1);
}

/* The key has the layout of struct assignment_key (layout/connection.h). */
static __always_inline void connection_begin(const void *key, __u32 backend)
{
	struct backend_load *load = load_of(backend);
	struct connection connection = { .backend = backend };
	long failed;

	if (!load)
		return;
	connection.generation = load->generation;
	failed = bpf_map_update_elem(MAP(connections), key, &connection, BPF_NOEXIST);
	if (failed != -EEXIST)
		load_begin(load, !failed);
}

/*
 * The value that is read before the deletion belongs to the deleted element: elements never change,
 * and an element that was deleted and filled again meanwhile has another key.
 */
static __always_inline void connection_end(const void *key)
{
	struct connection *found = LOOKUP(struct connection, connections, key);
	struct connection ended;

	if (!found)
		return;
	ended = *found;
	if (!bpf_map_delete_elem(MAP(connections), key))
		load_end(ended.backend, ended.generation);
}

#endif

#endif
