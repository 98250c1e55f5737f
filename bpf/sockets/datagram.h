/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What a datagram socket remembers: its backend for each frontend, and which frontend a backend's
 * replies are from. Most send to one frontend: that takes one write.
 */
#ifndef EBPFLB_SOCKETS_DATAGRAM_H
#define EBPFLB_SOCKETS_DATAGRAM_H

#include "core/client.h"
#include "rules/backend.h"
#include "sockets/memory.h"

/*
 * The backend that a datagram socket has for a frontend: kept as long as the service has it,
 * connected or not (kube-proxy keeps a flow: kube-proxy.md 11.1 and 21.6), and forgotten when the
 * socket has been silent for as long as conntrack keeps a flow (nf_conntrack_udp_timeout). No hook
 * sees what a connected socket sends.
 *
 * That of a socket's first frontend is the socket's own entry. Those of further ones form a linked
 * list from there, so that all of them are deleted when the socket is released, up to ASSIGNMENTS;
 * the LRU evicts the others, and all of a socket for which the map of sockets had no room.
 */

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

/*
 * A connection is translated once, as by conntrack: what a socket hook has translated goes to its
 * backend, also if a Service claims the backend's address as its external address or NodePort
 * (CVE-2020-8554). The packet does not show that, but the kernel keeps its socket on the way from a pod
 * through a veth to ingress here (Linux 4.19), and from this node's own sockets to egress.
 */

/* Whether the packet's socket is known to talk to the packet's destination in place of a frontend. */
static __always_inline bool socket_has_translated(struct __sk_buff *ctx, const struct tuple *tuple)
{
	struct peer peer = { .socket = ctx->sk ? get_socket_cookie(ctx) : 0,
			     .address = tuple->destination,
			     .port = tuple->destination_port };
	struct peer_frontend *found;

	if (!peer.socket)
		return false;
	found = datagram_find(&peer);	/* a stream socket has its own entry alone */
	return found && found->backend;		/* 0: refused, path/socket.h */
}

#endif
