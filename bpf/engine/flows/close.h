/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Deletes the entries of a flow: because a newer flow has the same tuple, or because another flow
 * takes over its port. The reply's entry is deleted first.
 */
#ifndef EBPFLB_ENGINE_FLOWS_CLOSE_H
#define EBPFLB_ENGINE_FLOWS_CLOSE_H

#include "core/settings.h"
#include "engine/flows/count.h"

/* Writes the tuple of a flow's requests, from the tuple and the entry of its replies at egress. */
static __always_inline void request_tuple_write(struct tuple *request_tuple,
						const struct tuple *reply_tuple,
						const struct flow *reply_entry)
{
	tuple_write_reverse(request_tuple, reply_tuple, HOOK_INGRESS);
	request_tuple->source_port = reply_entry->other_port;
	request_tuple->destination = reply_entry->address;
	request_tuple->destination_port = reply_entry->port;
}

/* Whether requests at this hook, as the entry translates them, have replies with this tuple. */
static __always_inline bool request_leads_to(const struct tuple *request_tuple,
					     const struct flow *request_entry,
					     const struct tuple *reply_tuple, const enum hook hook)
{
	if (hook == HOOK_INGRESS)
		return request_entry->other_port == reply_tuple->destination_port &&
		       request_entry->port == reply_tuple->source_port &&
		       address_equal(&request_tuple->source, &reply_tuple->destination) &&
		       address_equal(&request_entry->address, &reply_tuple->source);
	return request_entry->port == reply_tuple->destination_port &&
	       request_entry->other_port == reply_tuple->source_port &&
	       address_equal(&request_entry->address, &reply_tuple->destination) &&
	       address_equal(&request_tuple->destination, &reply_tuple->source);
}

/* Turns an entry into one that only holds its port (`resting` is memory for that). */
static __always_inline void port_rest(const struct tuple *reply_tuple,
				      const struct flow *reply_entry, struct flow *resting)
{
	if (!flow_copy(resting, reply_tuple, reply_entry))
		return;
	resting->flags |= FLOW_FIN;
	resting->kind = FLOW_RESTING;
	flow_update(reply_tuple, resting, BPF_EXIST);
}

/*
 * Deletes the entry that holds a port allocated by this node, or lets the port rest. A port rests if one
 * side has closed in order: the backend may be in TIME_WAIT and would take a new connection from this
 * port for a part of the old one.
 */
static __always_inline void port_close(const struct tuple *reply_tuple,
				       const struct flow *reply_entry, __u32 request_flags,
				       const bool rests, struct flow *resting)
{
	__u32 flags = reply_entry->flags | request_flags;

	if (!rests || !(reply_entry->flags & FLOW_SEEN) || !(flags & FLOW_FIN) ||
	    flags & FLOW_RST)
		flow_delete(reply_tuple);
	else
		port_rest(reply_tuple, reply_entry, resting);
}

/* Deletes the un-SNAT entry if it is still this flow's: another may have the port by now. */
static __always_inline void un_snat_close(const struct tuple *snat_tuple,
					  const struct flow *snat_entry, const bool rests,
					  struct flow *resting)
{
	struct tuple translated = flow_translate(snat_tuple, snat_entry);
	struct tuple un_snat_tuple = tuple_reverse(&translated, HOOK_INGRESS);
	struct flow *reply_entry = flow_find(&un_snat_tuple);

	if (reply_entry && reply_entry->kind == FLOW_UN_SNAT &&
	    reply_entry->port == snat_tuple->source_port &&
	    address_equal(&reply_entry->address, &snat_tuple->source))
		port_close(&un_snat_tuple, reply_entry, snat_entry->flags, rests, resting);
}

static __always_inline void snat_close(const struct tuple *snat_tuple, const bool rests,
				       struct flow *resting)
{
	struct flow *snat_entry = flow_find(snat_tuple);

	if (snat_entry && snat_entry->kind == FLOW_SNAT)
		un_snat_close(snat_tuple, snat_entry, rests, resting);
	flow_delete(snat_tuple);
}

/* Closes a flow because a newer one has its tuple. The ports that this node chose for it rest. */
static __always_inline void flow_close(const struct tuple *request_tuple,
				       const struct flow *request_entry,
				       struct flow *resting)
{
	bool masqueraded = request_entry->flags & FLOW_MASQUERADE;
	bool changed = request_entry->other_port != request_tuple->source_port;
	struct tuple translated = flow_translate(request_tuple, request_entry);
	struct tuple reply_tuple = tuple_reverse(&translated, HOOK_EGRESS);
	struct flow *reply_entry = flow_find(&reply_tuple);

	if (reply_entry)
		port_close(&reply_tuple, reply_entry, request_entry->flags, changed,
			   resting);
	if (masqueraded) {
		translated.hook = HOOK_EGRESS;
		snat_close(&translated, true, resting);
	}
	flow_delete(request_tuple);
	flow_uncount(request_entry->connection);
}

/* Deletes all entries of the flow whose requests have the tuple ending->between at egress. */
static __always_inline void flow_end(struct ending *ending)
{
	struct flow *reply_entry, *request_entry;
	__u64 connection;

	tuple_write_reverse(&ending->reply_tuple, &ending->between, HOOK_EGRESS);
	reply_entry = flow_find(&ending->reply_tuple);
	if (reply_entry) {
		request_tuple_write(&ending->request_tuple, &ending->reply_tuple, reply_entry);
		request_entry = flow_find(&ending->request_tuple);
		connection = reply_entry->connection;
		if (request_entry && request_leads_to(&ending->request_tuple, request_entry,
						      &ending->reply_tuple, HOOK_INGRESS))
			flow_delete(&ending->request_tuple);
		flow_delete(&ending->reply_tuple);
		flow_uncount(connection);
	}
	snat_close(&ending->between, false, NULL);
}

#endif
