/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Datagram sockets: a socket keeps one backend for a frontend as long as the service has it,
 * connected or not (kube-proxy keeps a flow: kube-proxy.md 11.1 and 21.6), and forgets it when it
 * has been silent for as long as conntrack keeps a flow (nf_conntrack_udp_timeout). No hook sees
 * what a connected socket sends.
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

#define STREAM_AFTER (2 * SECOND)	/* nf_conntrack_proto_udp.c: of a flow with replies */

static __always_inline void assignment_use(struct assignment *assignment, __u64 now)
{
	bool is_stream = assignment->stream_from && now >= assignment->stream_from;
	struct settings *settings = settings_read();

	if (settings)
		assignment->expires = now + SECOND * (is_stream ? settings->udp_stream_timeout
								: settings->udp_timeout);
}

/* The assignment of a request, unless it has expired. */
static __always_inline struct assignment *assignment_of(const struct request *request)
{
	struct assignment_key key = { .socket = request->socket, .frontend = *request->frontend };
	struct assignment *found = LOOKUP(struct assignment, assignments, &key);

	return found && bpf_ktime_get_ns() < found->expires ? found : NULL;
}

static __always_inline bool assignment_find(const struct request *request, __u32 service,
					    struct backend *backend)
{
	struct assignment *found = assignment_of(request);

	if (!found || found->service != service || !backend_find(service, found->backend, backend))
		return false;
	assignment_use(found, bpf_ktime_get_ns());
	return true;
}

/* A reply was received from the backend that the socket has for this frontend. */
static __always_inline void assignment_reply(__u64 socket, const struct frontend *frontend)
{
	struct assignment_key key = { .socket = socket, .frontend = *frontend };
	struct assignment *found = LOOKUP(struct assignment, assignments, &key);
	__u64 now = bpf_ktime_get_ns();

	if (!found)
		return;
	if (!found->stream_from)
		found->stream_from = now + STREAM_AFTER;
	assignment_use(found, now);
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
	assignment_use(&assignment, bpf_ktime_get_ns());
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
