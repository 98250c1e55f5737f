/* SPDX-License-Identifier: GPL-2.0 */
/*
 * How many connections a backend has, of services with SERVICE_LEAST_CONNECTIONS: exactly as many
 * as elements of the map connections name it. Who inserts one adds to its backend's count; who
 * deletes one subtracts, and of several who try to only one does. So each connection is counted
 * once and ended once: by the socket's hooks or by packets, also on two CPUs at once, or by the
 * agent, which ends what nothing remembers any more (hooks/connection_end.c), because an LRU has
 * evicted it or a sweep has deleted it.
 *
 * Programs before 5.12 cannot add to a number and learn what it was, but they need not.
 */
#ifndef EBPFLB_PATH_CONNECTION_H
#define EBPFLB_PATH_CONNECTION_H

#include "maps.h"

#ifdef RECORD

/* `ebpflb explain` reads the node's own counts, and opens nothing. */
static __always_inline void connection_begin(const void *key, __u32 backend)
{
}

static __always_inline void connection_end(const void *key)
{
}

#else

/* The key has the layout of struct assignment_key (layout/connection.h). */
static __always_inline void connection_begin(const void *key, __u32 backend)
{
	struct backend_load *load = LOOKUP(struct backend_load, backend_loads, &backend);
	struct connection connection = { .backend = backend };
	long failed;

	if (!load)
		return;
	connection.generation = load->generation;
	failed = bpf_map_update_elem(MAP(connections), key, &connection, BPF_NOEXIST);
	if (!failed)
		__sync_fetch_and_add(&load->open, 1);
	else if (failed != -EEXIST)
		__sync_fetch_and_add(&load->uncounted, 1);
}

/*
 * What was read before the element was deleted was its own: elements never change, and one that was
 * deleted and filled anew meanwhile has another key. The count of a backend that was removed
 * is none of the next one's that has its id.
 */
static __always_inline void connection_end(const void *key)
{
	struct connection *found = LOOKUP(struct connection, connections, key);
	struct backend_load *load;
	struct connection ended;

	if (!found)
		return;
	ended = *found;
	if (bpf_map_delete_elem(MAP(connections), key))
		return;
	load = LOOKUP(struct backend_load, backend_loads, &ended.backend);
	if (load && load->generation == ended.generation)
		__sync_fetch_and_add(&load->open, -1);
}

#endif

#endif
