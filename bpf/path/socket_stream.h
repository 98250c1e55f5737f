/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What a socket remembers: the frontend that its real peer stands for, so that recvmsg and
 * getpeername can show it. When the socket is released, it is forgotten.
 *
 * The maps are LRU because kernel sockets are never released (sock_release is for user space).
 */
#ifndef EBPFLB_PATH_SOCKET_STREAM_H
#define EBPFLB_PATH_SOCKET_STREAM_H

#include "path/verdict.h"
#include "net/address.h"

static __always_inline struct peer_frontend socket_origin(const struct frontend *frontend,
						   const struct backend *backend)
{
	return (struct peer_frontend){ .frontend = *frontend,
				.backend = backend->id,
				.address = backend->address,
				.port = backend->port };
}

/* A stream socket has one peer at a time; connecting again replaces it. */
static __always_inline void stream_remember(__u64 socket, const struct frontend *frontend,
					    const struct backend *backend)
{
	struct peer key = { .socket = socket };
	struct peer_frontend origin = socket_origin(frontend, backend);

	if (bpf_map_update_elem(MAP(sockets), &key, &origin, BPF_NOEXIST)) {
		struct peer_frontend *former = LOOKUP(struct peer_frontend, sockets, &key);

		if (former)
			backend_count_closed(former->backend);
		bpf_map_update_elem(MAP(sockets), &key, &origin, BPF_ANY);
	}
	backend_count_opened(backend->id);
}

/* The frontend, if the socket is still connected to the backend that it was given. */
static __always_inline struct peer_frontend *stream_origin(const struct peer *peer)
{
	struct peer key = { .socket = peer->socket };
	struct peer_frontend *origin = LOOKUP(struct peer_frontend, sockets, &key);

	if (!origin || origin->port != peer->port ||
	    !address_equal(&origin->address, &peer->address))
		return NULL;
	return origin;
}

static __always_inline void stream_forget(__u64 socket)
{
	struct peer key = { .socket = socket };
	struct peer_frontend *origin = LOOKUP(struct peer_frontend, sockets, &key);

	if (!origin)
		return;
	backend_count_closed(origin->backend);
	bpf_map_delete_elem(MAP(sockets), &key);
}

#endif
