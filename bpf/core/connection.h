/* SPDX-License-Identifier: GPL-2.0 */
/*
 * How many connections a backend has, of services with SERVICE_LEAST_CONNECTIONS: exactly as many
 * as elements of two maps name it. Who inserts one adds to its backend's count; who deletes one
 * subtracts, and of several who try to only one does. So each connection is counted once and ended
 * once.
 *
 *   sockets      of stream sockets: written under the socket's lock, by connect(), and deleted by
 *                the next one, at the release, or for the agent (hooks/socket_end.c)
 *   connections  of datagram sockets, whose calls take no lock, and of packets: written and deleted
 *                on two CPUs at once, or deleted for the agent, which ends what nothing remembers
 *                any more (hooks/connection_end.c), because an LRU has evicted it or a sweep has
 *                deleted it
 *
 * The count of a backend that was removed is none of the next one's that has its id.
 *
 * Programs before 5.12 cannot add to a number and learn what it was, but they need not.
 */
#ifndef EBPFLB_CORE_CONNECTION_H
#define EBPFLB_CORE_CONNECTION_H

#include "maps.h"

static __always_inline struct backend_load *load_of(__u32 backend)
{
	return LOOKUP_NUMBER(struct backend_load, backend_loads, backend);
}

#ifdef RECORD

/* `ebpflb explain` reads the node's own counts, and opens nothing. */
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

/* A connection is counted, or is not, as its map was full. */
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
 * What was read before the element was deleted was its own: elements never change, and one that was
 * deleted and filled anew meanwhile has another key.
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
