/* SPDX-License-Identifier: GPL-2.0 */
/* Deletes the entries of a flow that a newer one of the same tuple replaces, the reply's first. */
#ifndef EBPFLB_ENGINE_FLOWS_CLOSE_H
#define EBPFLB_ENGINE_FLOWS_CLOSE_H

#include "engine/flows/table.h"

/*
 * Deletes the un-SNAT entry only if it is still this flow's: after a flow has ended, another one
 * may get its source port (source_port_is_free in masquerade.h).
 */
static __always_inline void un_snat_close(const struct tuple *snat_tuple,
					  const struct flow *snat_entry)
{
	struct tuple translated = flow_translate(snat_tuple, snat_entry);
	struct tuple reply_tuple = tuple_reverse(&translated, HOOK_INGRESS);
	struct flow *reply_entry = flow_find(&reply_tuple);

	if (reply_entry && reply_entry->port == snat_tuple->source_port &&
	    address_equal(&reply_entry->address, &snat_tuple->source))
		flow_delete(&reply_tuple);
}

static __always_inline void snat_close(const struct tuple *snat_tuple)
{
	struct flow *snat_entry = flow_find(snat_tuple);

	if (snat_entry && snat_entry->kind == FLOW_SNAT)
		un_snat_close(snat_tuple, snat_entry);
	flow_delete(snat_tuple);
}

static __always_inline void flow_close(const struct tuple *request_tuple,
				       const struct flow *request_entry)
{
	bool masqueraded = request_entry->flags & FLOW_MASQUERADE;
	struct tuple translated = flow_translate(request_tuple, request_entry);
	struct tuple reply_tuple = tuple_reverse(&translated, HOOK_EGRESS);

	flow_delete(&reply_tuple);
	if (masqueraded) {
		translated.hook = HOOK_EGRESS;
		snat_close(&translated);
	}
	flow_delete(request_tuple);
}

#endif
