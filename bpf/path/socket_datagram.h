/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Datagram sockets: a socket keeps one backend for a frontend as long as the service has it,
 * connected or not (kube-proxy keeps a flow: kube-proxy.md 11.1 and 21.6).
 *
 * A socket's assignments form a linked list from a head without frontend, so that all of them are
 * deleted when the socket is released, up to ASSIGNMENTS; the LRU evicts the rest.
 */
#ifndef EBPFLB_PATH_SOCKET_DATAGRAM_H
#define EBPFLB_PATH_SOCKET_DATAGRAM_H

#include "path/backend.h"
#include "path/client.h"
#include "path/socket_stream.h"

#define ASSIGNMENTS 16

static __always_inline bool assignment_exists(const struct request *request)
{
	struct assignment_key key = { .socket = request->socket, .frontend = *request->frontend };

	return LOOKUP(struct assignment, assignments, &key) != NULL;
}

static __always_inline bool assignment_find(const struct request *request, __u32 service,
					    struct backend *backend)
{
	struct assignment_key key = { .socket = request->socket, .frontend = *request->frontend };
	struct assignment *found = LOOKUP(struct assignment, assignments, &key);

	return found && found->service == service && backend_find(service, found->backend, backend);
}

/* Keeps the entry in `sockets` if it now belongs to another frontend of this socket. */
static __always_inline void assignment_close(const struct assignment_key *key,
					     const struct assignment *assignment)
{
	struct peer peer = { .socket = key->socket,
			     .address = assignment->address,
			     .port = assignment->port };
	struct peer_frontend *entry = LOOKUP(struct peer_frontend, sockets, &peer);

	if (entry && frontend_equal(&entry->frontend, &key->frontend))
		bpf_map_delete_elem(MAP(sockets), &peer);
	backend_count_closed(assignment->backend);
}

/* Makes the key the first of its socket's list; the former first one becomes its next. */
static __always_inline void list_insert(const struct assignment_key *key, struct frontend *next)
{
	struct assignment_key head_key = { .socket = key->socket };
	struct assignment head = { .next = key->frontend };
	struct assignment *former = LOOKUP(struct assignment, assignments, &head_key);

	if (former)
		*next = former->next;
	bpf_map_update_elem(MAP(assignments), &head_key, &head, 0);
}

static __always_inline void assignment_open(const struct assignment_key *key,
					    const struct backend *backend)
{
	struct assignment *former = LOOKUP(struct assignment, assignments, key);
	struct assignment assignment = { .service = backend->service,
					 .backend = backend->id,
					 .address = backend->address,
					 .port = backend->port };

	if (former) {
		assignment.next = former->next;
		assignment_close(key, former);
	} else {
		list_insert(key, &assignment.next);
	}
	bpf_map_update_elem(MAP(assignments), key, &assignment, 0);
	backend_count_opened(backend->id);
}

/* If a socket has one backend for two frontends, replies show the frontend last sent to. */
static __always_inline void datagram_open(const struct request *request,
					  const struct backend *backend, bool is_assigned)
{
	struct assignment_key key = { .socket = request->socket, .frontend = *request->frontend };
	struct peer peer = { .socket = request->socket,
			     .address = backend->address,
			     .port = backend->port };
	struct peer_frontend entry = peer_frontend_of(request, backend);
	struct peer_frontend *former;

	if (!is_assigned)
		assignment_open(&key, backend);
	former = LOOKUP(struct peer_frontend, sockets, &peer);
	if (former)
		*former = entry;
	else
		bpf_map_update_elem(MAP(sockets), &peer, &entry, 0);
}

/* Deletes one assignment; afterwards key names the next one of the list. */
static __always_inline bool list_delete(struct assignment_key *key)
{
	struct assignment *found = LOOKUP(struct assignment, assignments, key);

	if (!found)
		return false;
	struct assignment assignment = *found;

	if (key->frontend.port)
		assignment_close(key, &assignment);
	bpf_map_delete_elem(MAP(assignments), key);
	key->frontend = assignment.next;
	return key->frontend.port != 0;
}

static __always_inline void datagram_release(__u64 socket)
{
	struct assignment_key key = { .socket = socket };

	for (int deleted = 0; deleted <= ASSIGNMENTS; deleted++)
		if (!list_delete(&key))
			return;
}

#endif
