/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Stream sockets: the frontend that a socket's peer stands for is remembered, so that getpeername
 * can show it, until the socket is released.
 */
#ifndef EBPFLB_SOCKETS_STREAM_H
#define EBPFLB_SOCKETS_STREAM_H

#include "sockets/memory.h"

/* The entry's connection is counted once, as long as the entry is there (core/connection.h). */
static __always_inline void stream_release(__u64 socket)
{
	struct socket_entry *entry = socket_find(socket);
	__u32 backend, counted;

	if (!entry)
		return;
	backend = entry->peer.backend;
	counted = entry->counted;
	if (socket_delete(socket, backend) && counted)
		load_end(backend, counted - 1);
}

/* A stream socket has one peer at a time; connecting again replaces it. */
static __always_inline long stream_remember(__u64 socket, const struct socket_entry *entry)
{
	long result = entry_insert(socket, entry);

	if (result != -EEXIST)
		return result;
	stream_release(socket);
	return entry_insert(socket, entry);
}

static __always_inline void stream_open(const struct request *request,
					const struct backend *backend, bool is_counted)
{
	struct backend_load *load = is_counted ? load_of(backend->id) : NULL;
	struct socket_entry entry =
		socket_entry_of(request, backend, load ? load->generation + 1 : 0);
	long failed = stream_remember(request->socket, &entry);

	backend_count_opened(backend->id);
	if (load)
		load_begin(load, !failed);
	if (!failed)
		return;
	backend_count_closed(backend->id);
	__sync_fetch_and_add(&sockets_full_counters()->streams, 1);
}

/* The entry, if the socket is still connected to the backend in it. */
static __always_inline struct peer_frontend *stream_find(const struct peer *peer)
{
	struct socket_entry *entry = socket_find(peer->socket);

	return entry && is_backend_of(&entry->peer, &peer->address, peer->port) ? &entry->peer
										: NULL;
}

#endif
