/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Datagram sockets: each keeps one backend for a frontend as long as that backend serves, be it
 * connected or not (kube-proxy keeps a flow: kube-proxy.md 11.1 and 21.6).
 *
 * A socket's assignments form a chain from a head without frontend, so that its release takes
 * all of them away, up to CHAIN; LRU takes what a socket with more frontends leaves.
 */
#ifndef EBPFLB_PATH_SOCKET_DATAGRAM_H
#define EBPFLB_PATH_SOCKET_DATAGRAM_H

#include "path/backend.h"
#include "path/socket_stream.h"

#define CHAIN 16

static __always_inline bool assignment_find(const struct assignment_key *sender, __u32 service,
					    struct backend *backend)
{
	struct assignment *found = LOOKUP(struct assignment, assignments, sender);

	return found && found->service == service && backend_find(service, found->backend, backend);
}

/* The peer stays where it stands for another frontend of the socket by now. */
static __always_inline void assignment_end(const struct assignment_key *sender,
					   const struct assignment *assignment)
{
	struct peer peer = { .socket = sender->socket,
			     .address = assignment->address,
			     .port = assignment->port };
	struct peer_frontend *origin = LOOKUP(struct peer_frontend, sockets, &peer);

	if (origin && frontend_equal(&origin->frontend, &sender->frontend))
		bpf_map_delete_elem(MAP(sockets), &peer);
	backend_count_closed(assignment->backend);
}

/* Puts the sender first in its socket's chain; the former first is its next one. */
static __always_inline void chain_push(const struct assignment_key *sender, struct frontend *next)
{
	struct assignment_key head = { .socket = sender->socket };
	struct assignment first = { .next = sender->frontend };
	struct assignment *former = LOOKUP(struct assignment, assignments, &head);

	if (former)
		*next = former->next;
	bpf_map_update_elem(MAP(assignments), &head, &first, 0);
}

static __always_inline void assignment_make(const struct assignment_key *sender,
					    const struct backend *backend)
{
	struct assignment *former = LOOKUP(struct assignment, assignments, sender);
	struct assignment assignment = { .service = backend->service,
					 .backend = backend->id,
					 .address = backend->address,
					 .port = backend->port };

	if (former) {
		assignment.next = former->next;
		assignment_end(sender, former);
	} else {
		chain_push(sender, &assignment.next);
	}
	bpf_map_update_elem(MAP(assignments), sender, &assignment, 0);
	backend_count_opened(backend->id);
}

/* Where one backend serves two frontends of a socket, its answers show the one last sent to. */
static __always_inline void datagram_remember(const struct assignment_key *sender,
					      const struct backend *backend)
{
	struct peer peer = { .socket = sender->socket,
			     .address = backend->address,
			     .port = backend->port };
	struct peer_frontend *known = LOOKUP(struct peer_frontend, sockets, &peer);
	struct peer_frontend origin = socket_origin(&sender->frontend, backend);

	if (known)
		*known = origin;
	else
		bpf_map_update_elem(MAP(sockets), &peer, &origin, 0);
}

/* Ends one assignment; afterwards link names the next next one. */
static __always_inline bool chain_cut(struct assignment_key *link)
{
	struct assignment *found = LOOKUP(struct assignment, assignments, link);

	if (!found)
		return false;
	struct assignment assignment = *found;

	if (link->frontend.port)
		assignment_end(link, &assignment);
	bpf_map_delete_elem(MAP(assignments), link);
	link->frontend = assignment.next;
	return link->frontend.port != 0;
}

static __always_inline void datagram_forget(__u64 socket)
{
	struct assignment_key link = { .socket = socket };

	for (int links = 0; links <= CHAIN; links++)
		if (!chain_cut(&link))
			return;
}

#endif
