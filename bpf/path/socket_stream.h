/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Stream sockets: the frontend that a socket's peer stands for is remembered, so that getpeername
 * can show it, until the socket is released.
 */
#ifndef EBPFLB_PATH_SOCKET_STREAM_H
#define EBPFLB_PATH_SOCKET_STREAM_H

#include "path/socket_memory.h"

/* A stream socket has one peer at a time; connecting again replaces it. */
static __always_inline long stream_replace(__u64 socket, const struct socket_entry *entry)
{
	struct socket_entry *former = socket_find(socket);

	if (former) {
		backend_count_closed(former->peer.backend);
		entry_end(socket, former);
	}
	return bpf_map_update_elem(MAP(sockets), &socket, entry, BPF_ANY);
}

static __always_inline void stream_open(const struct request *request,
					const struct backend *backend, bool is_counted)
{
	struct socket_entry entry = socket_entry_of(request, backend, is_counted);
	__u64 socket = request->socket;
	long result = bpf_map_update_elem(MAP(sockets), &socket, &entry, BPF_NOEXIST);
	struct sockets_full *full;

	if (result == ALREADY_THERE)
		result = stream_replace(socket, &entry);
	backend_count_opened(backend->id);
	if (!result) {
		entry_begin(socket, &entry);
		return;
	}
	backend_count_closed(backend->id);
	full = sockets_full_counters();
	if (full)
		__sync_fetch_and_add(&full->streams, 1);
}

/* The entry, if the socket is still connected to the backend in it. */
static __always_inline struct peer_frontend *stream_find(const struct peer *peer)
{
	struct socket_entry *entry = socket_find(peer->socket);

	return entry && is_backend_of(&entry->peer, &peer->address, peer->port) ? &entry->peer
										: NULL;
}

static __always_inline void stream_release(__u64 socket)
{
	struct socket_entry *entry = socket_find(socket);

	if (entry)
		socket_delete(socket, entry);
}

#endif
