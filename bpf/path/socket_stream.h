/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Stream sockets: the frontend that a socket's peer stands for is remembered, so that getpeername
 * can show it, until the socket is released.
 *
 * The map is an LRU because sockets of the kernel are never released (sock_release is for user
 * space).
 */
#ifndef EBPFLB_PATH_SOCKET_STREAM_H
#define EBPFLB_PATH_SOCKET_STREAM_H

#include "net/address.h"
#include "path/client.h"
#include "path/counters.h"

static __always_inline struct peer_frontend peer_frontend_of(const struct request *request,
							     const struct backend *backend)
{
	return (struct peer_frontend){ .frontend = *request->frontend,
				       .backend = backend->id,
				       .address = backend->address,
				       .port = backend->port,
				       .is_connected = request->is_connected };
}

/* A stream socket has one peer at a time; connecting again replaces it. */
static __always_inline void stream_open(const struct request *request,
					const struct backend *backend)
{
	struct peer key = { .socket = request->socket };
	struct peer_frontend entry = peer_frontend_of(request, backend);

	if (bpf_map_update_elem(MAP(sockets), &key, &entry, BPF_NOEXIST)) {
		struct peer_frontend *former = LOOKUP(struct peer_frontend, sockets, &key);

		if (former)
			backend_count_closed(former->backend);
		bpf_map_update_elem(MAP(sockets), &key, &entry, BPF_ANY);
	}
	backend_count_opened(backend->id);
}

/* The entry, if the socket is still connected to the backend in it. */
static __always_inline struct peer_frontend *stream_find(const struct peer *peer)
{
	struct peer key = { .socket = peer->socket };
	struct peer_frontend *entry = LOOKUP(struct peer_frontend, sockets, &key);

	if (!entry || entry->port != peer->port || !address_equal(&entry->address, &peer->address))
		return NULL;
	return entry;
}

static __always_inline void stream_release(__u64 socket)
{
	struct peer key = { .socket = socket };
	struct peer_frontend *entry = LOOKUP(struct peer_frontend, sockets, &key);

	if (!entry)
		return;
	backend_count_closed(entry->backend);
	bpf_map_delete_elem(MAP(sockets), &key);
}

#endif
