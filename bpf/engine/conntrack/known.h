/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Whether the kernel's conntrack knows the flow of a packet that asks for a service.
 *
 * It is asked whichever engine opens new flows, so that a change of the engine breaks no connection;
 * on kernels without the functions for it (kfuncs.h) it knows none.
 */
#ifndef EBPFLB_ENGINE_CONNTRACK_KNOWN_H
#define EBPFLB_ENGINE_CONNTRACK_KNOWN_H

#include "path/client.h"

#ifdef HAVE_CONNTRACK

#include "engine/conntrack/entry.h"

/*
 * Where new flows go to the flow tables only a translated entry counts: others may be left over from
 * a time before the service.
 */
static __always_inline bool conntrack_knows(const struct request *request)
{
	EMPTY(struct ct_key, key);
	struct ct_found found;

	if (request->tuple->protocol == SCTP)
		return false;
	ct_key_write(key, request->tuple);
	found = ct_find(request->packet, key);
#ifdef RECORD
	found.known &= !found.over;	/* it stays in the table: nothing on the node may change */
#else
	if (found.over)
		found = ct_find(request->packet, key);
#endif
	return found.known &&
	       (request->settings->flags & SETTING_CONNTRACK || found.translated);
}

#else

static __always_inline bool conntrack_knows(const struct request *request)
{
	return false;
}

#endif
#endif
