/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What is remembered of a socket, by its cookie, from its first connection or datagram until it is
 * released. In a full table nothing is remembered: a connection goes on all the same, but
 * getpeername shows its backend, and it counts as closed at once, for no release would count it.
 */
#ifndef EBPFLB_SOCKETS_MEMORY_H
#define EBPFLB_SOCKETS_MEMORY_H

#include "core/client.h"
#include "core/connection.h"
#include "core/counters.h"
#include "net/address.h"
#include "sockets/place.h"

static __always_inline struct socket_entry socket_entry_of(const struct request *request,
							   const struct backend *backend,
							   __u32 counted)
{
	return (struct socket_entry){ .peer = { .frontend = *request->frontend,
						.backend = backend->id,
						.address = backend->address,
						.port = backend->port,
						.is_connected = request->is_connected },
				      .service = backend->service,
				      .netns = request->netns,
				      .counted = counted };
}

static __always_inline bool is_backend_of(const struct peer_frontend *entry,
					  const struct address *address, __be16 port)
{
	return entry->port == port && address_equal(&entry->address, address);
}

/* Forgets a socket; of two that do so at the same time one counts. */
static __always_inline bool socket_delete(__u64 socket, __u32 backend)
{
	if (!entry_delete(socket))
		return false;
	backend_count_closed(backend);
	return true;
}

#endif
