/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The backend that a datagram socket has for a frontend: kept as long as the service has it,
 * connected or not (kube-proxy keeps a flow: kube-proxy.md 11.1 and 21.6), and forgotten when the
 * socket has been silent for as long as conntrack keeps a flow (nf_conntrack_udp_timeout). No hook
 * sees what a connected socket sends.
 *
 * That of a socket's first frontend is the socket's own entry. Those of further ones form a linked
 * list from there, so that all of them are deleted when the socket is released, up to ASSIGNMENTS;
 * the LRU evicts the rest, and those of sockets that have no entry as the table was full.
 */
#ifndef EBPFLB_SOCKETS_ASSIGNMENT_H
#define EBPFLB_SOCKETS_ASSIGNMENT_H

#include "core/client.h"
#include "rules/backend.h"
#include "sockets/memory.h"

#define ASSIGNMENTS 16

static __always_inline void assignment_use(struct socket_entry *entry, __u64 now)
{
	bool is_stream = entry->stream_from && now >= entry->stream_from;
	struct settings *settings = settings_read();

	entry->expires = now + SECOND * (is_stream ? settings->udp_stream_timeout
						   : settings->udp_timeout);
}

/* Whether a datagram socket may have entries beside its own. */
static __always_inline bool has_further(const struct socket_entry *own)
{
	return (own && own->next.port) || sockets_full_counters()->datagrams;
}

/* The entry of a datagram socket for a frontend, expired or not. */
static __always_inline struct socket_entry *assignment_read(__u64 socket,
							    const struct frontend *frontend)
{
	struct assignment_key key = { .socket = socket, .frontend = *frontend };
	struct socket_entry *own = socket_find(socket);

	if (own && frontend_equal(&own->peer.frontend, frontend))
		return own;
	return has_further(own) ? LOOKUP(struct socket_entry, assignments, &key) : NULL;
}

/* The assignment of a request, unless it has expired. */
static __always_inline struct socket_entry *assignment_of(const struct request *request)
{
	struct socket_entry *found = assignment_read(request->socket, request->frontend);

	return found && bpf_ktime_get_ns() < found->expires ? found : NULL;
}

static __always_inline bool assignment_find(const struct request *request, __u32 service,
					    struct backend *backend)
{
	struct socket_entry *found = assignment_of(request);

	if (!found || found->service != service ||
	    !backend_find(service, found->peer.backend, backend))
		return false;
	record(STEP_ASSIGNED, found->peer.backend);
	assignment_use(found, bpf_ktime_get_ns());
	return true;
}

/* A reply was received from the backend that the socket has for this frontend. */
static __always_inline void assignment_reply(__u64 socket, const struct frontend *frontend)
{
	struct socket_entry *found = assignment_read(socket, frontend);
	struct settings *settings = settings_read();
	__u64 now = bpf_ktime_get_ns();

	if (!found)
		return;
	if (!found->stream_from)
		found->stream_from = now + settings->stream_after * SECOND;
	assignment_use(found, now);
}

/* Keeps the entry in `peers` if it now belongs to another frontend of this socket. */
static __always_inline void peer_forget(__u64 socket, const struct peer_frontend *former)
{
	struct peer peer = { .socket = socket,
			     .address = former->address,
			     .port = former->port };
	struct peer_frontend *entry = LOOKUP(struct peer_frontend, peers, &peer);

	if (entry && frontend_equal(&entry->frontend, &former->frontend))
		bpf_map_delete_elem(MAP(peers), &peer);
}

/* If a socket has one backend for two frontends, replies show the frontend last sent to. */
static __always_inline void peer_remember(__u64 socket, const struct peer_frontend *entry)
{
	struct peer peer = { .socket = socket, .address = entry->address, .port = entry->port };
	struct peer_frontend *former = LOOKUP(struct peer_frontend, peers, &peer);

	if (former)
		*former = *entry;
	else
		bpf_map_update_elem(MAP(peers), &peer, entry, BPF_ANY);
}

/* The service of a socket's own entry may count its flows (core/connection.h). */
static __always_inline void own_begin(__u64 socket, const struct socket_entry *own)
{
	struct assignment_key key = { .socket = socket, .frontend = own->peer.frontend };

	if (own->counted)
		connection_begin(&key, own->peer.backend);
}

static __always_inline void own_end(__u64 socket, const struct socket_entry *own)
{
	struct assignment_key key = { .socket = socket, .frontend = own->peer.frontend };

	if (own->counted)
		connection_end(&key);
}

/* Deletes one assignment of the list; afterwards key names the next one. */
static __always_inline void list_delete(struct assignment_key *key)
{
	struct socket_entry *found = LOOKUP(struct socket_entry, assignments, key);

	if (!found) {
		key->frontend.port = 0;
		return;
	}
	struct frontend next = found->next;

	peer_forget(key->socket, &found->peer);
	backend_count_closed(found->peer.backend);
	if (found->counted)
		connection_end(key);
	bpf_map_delete_elem(MAP(assignments), key);
	key->frontend = next;
}

#endif
