/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What a datagram socket remembers: its backend for each frontend (sockets/assignment.h), and which
 * frontend a backend's replies are from. Most send to one frontend: that takes one write.
 */
#ifndef EBPFLB_SOCKETS_DATAGRAM_H
#define EBPFLB_SOCKETS_DATAGRAM_H

#include "sockets/assignment.h"

/* The socket's own entry gets another backend. */
static __always_inline void own_replace(__u64 socket, struct socket_entry *own,
					struct socket_entry *entry)
{
	if (own->is_shared)
		peer_forget(socket, &own->peer);
	backend_count_closed(own->peer.backend);
	own_end(socket, own);
	backend_count_opened(entry->peer.backend);
	entry->next = own->next;
	entry_replace(socket, entry);
	own_begin(socket, entry);
}

/* To the frontend of the socket's own entry. */
static __always_inline void own_open(__u64 socket, struct socket_entry *own,
				     struct socket_entry *entry, bool is_assigned)
{
	if (!is_assigned) {
		own_replace(socket, own, entry);
		return;
	}
	own->peer.is_connected = entry->peer.is_connected;
	if (own->is_shared)
		peer_remember(socket, &entry->peer);
}

/* A socket without an entry of its own has no list, by which a release would find and count it. */
static __always_inline void further_unlisted(struct socket_entry *entry)
{
	struct backend_load *load = entry->counted ? load_of(entry->peer.backend) : NULL;

	if (load)
		load_begin(load, false);
	entry->is_unlisted = true;
	entry->counted = 0;
	backend_count_closed(entry->peer.backend);
	__sync_fetch_and_add(&sockets_full_counters()->datagrams, 1);
}

/*
 * Calls of datagram sockets take no lock. If another thread of the socket has given this frontend a
 * backend meanwhile, its element stays: it is in the list, which another one would close to a circle.
 */
static __always_inline void further_assign(__u64 socket, struct socket_entry *own,
					   struct socket_entry *entry)
{
	struct assignment_key key = { .socket = socket, .frontend = entry->peer.frontend };
	struct socket_entry *former = LOOKUP(struct socket_entry, assignments, &key);
	bool is_listed = former && !former->is_unlisted, is_first = own && !former;
	bool was_counted = former ? former->counted : entry->counted;

	if (former)
		peer_forget(socket, &former->peer);
	if (is_listed) {
		entry->next = former->next;
		backend_count_closed(former->peer.backend);
	} else if (own) {
		entry->next = own->next;
	} else {
		further_unlisted(entry);
	}
	if (bpf_map_update_elem(MAP(assignments), &key, entry, is_first ? BPF_NOEXIST : BPF_ANY) &&
	    is_first)
		return;
	if (was_counted)
		connection_end(&key);	/* also what the LRU has evicted */
	if (own && !is_listed)
		own->next = key.frontend;
	backend_count_opened(entry->peer.backend);
	if (entry->counted)
		connection_begin(&key, entry->peer.backend);
}

static __always_inline void further_open(__u64 socket, struct socket_entry *own,
					 struct socket_entry *entry, bool is_assigned)
{
	if (!is_assigned)
		further_assign(socket, own, entry);
	if (own && is_backend_of(&own->peer, &entry->peer.address, entry->peer.port))
		own->is_shared = true;
	peer_remember(socket, &entry->peer);
}

static __always_inline void datagram_open(const struct request *request,
					  const struct backend *backend, bool is_assigned,
					  bool is_counted)
{
	struct socket_entry entry = socket_entry_of(request, backend, is_counted), *own;
	__u64 socket = request->socket;

	if (!is_assigned) {
		assignment_use(&entry, bpf_ktime_get_ns());
		if (!entry_insert(socket, &entry)) {
			backend_count_opened(backend->id);
			own_begin(socket, &entry);
			return;
		}
	}
	own = socket_find(socket);
	if (own && frontend_equal(&own->peer.frontend, request->frontend))
		own_open(socket, own, &entry, is_assigned);
	else
		further_open(socket, own, &entry, is_assigned);
}

static __always_inline struct peer_frontend *datagram_find(const struct peer *peer)
{
	struct socket_entry *own = socket_find(peer->socket);
	struct peer_frontend *found = NULL;
	bool is_own = own && is_backend_of(&own->peer, &peer->address, peer->port);

	if (is_own && !own->is_shared)
		return &own->peer;
	if (has_further(own))
		found = LOOKUP(struct peer_frontend, peers, peer);
	if (!found && is_own)
		found = &own->peer;
	return found;
}

/*
 * Forgets a peer after the agent has ended the socket's connection to it. The socket's owner may have
 * connected it again meanwhile: another backend or frontend stays. The socket's own entry stays
 * without a frontend until the release, which counts the connection as closed.
 */
static __always_inline void datagram_end(__u64 socket, const struct peer_frontend *ended)
{
	struct socket_entry *own = socket_find(socket);

	peer_forget(socket, ended);
	if (!own || own->peer.backend != ended->backend ||
	    !frontend_equal(&own->peer.frontend, &ended->frontend))
		return;
	own->peer.frontend = (struct frontend){};
	own->is_shared = false;
}

static __always_inline void datagram_release(__u64 socket)
{
	struct socket_entry *own = socket_find(socket);
	struct assignment_key key = { .socket = socket };

	if (!own)
		return;
	key.frontend = own->next;
	own_end(socket, own);
	if (own->is_shared)
		peer_forget(socket, &own->peer);
	if (!socket_delete(socket, own->peer.backend))
		return;
	for (int deleted = 0; deleted < ASSIGNMENTS; deleted++) {
		if (!key.frontend.port)
			return;
		list_delete(&key);
	}
}

#endif
