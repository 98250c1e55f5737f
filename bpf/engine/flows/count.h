/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Flows of services that count their connections (core/connection.h). The entries of such a flow
 * between client and frontend contain a number. Direct connections and all other flows have none.
 */
#ifndef EBPFLB_ENGINE_FLOWS_COUNT_H
#define EBPFLB_ENGINE_FLOWS_COUNT_H

#include "core/connection.h"
#include "engine/flows/table.h"

#define FLOW_NUMBERS (1ULL << 63)	/* no socket cookie has this bit */

static __always_inline __u64 flow_number(const struct selection *selection, bool is_direct)
{
	__u64 random = (__u64)bpf_get_prandom_u32() << 32 | bpf_get_prandom_u32();

	return !is_direct && selection->service.flags & SERVICE_LEAST_CONNECTIONS
		       ? random | FLOW_NUMBERS : 0;
}

static __always_inline void flow_count(__u64 number, __u32 backend)
{
	struct assignment_key key = { .socket = number };

	if (number)
		connection_begin(&key, backend);
}

static __always_inline void flow_uncount(__u64 number)
{
	struct assignment_key key = { .socket = number };

	if (number)
		connection_end(&key);
}

/*
 * Ends the count of a connection that is over, or counts it again after a forged reset. Each side
 * notes its end before it reads the other side's. On two CPUs at once both may miss the other's
 * end. Then the next packet of either side ends the connection: its side's flags are noted already.
 */
static __always_inline void flow_follow_count(const struct flow *known, __u32 flags,
					      const struct tuple *translated)
{
	struct flow *opposite;

	if (!((known->flags | flags) & (FLOW_FIN | FLOW_RST)))
		return;
	opposite = flow_opposite(translated);
	if (flow_has_ended(flags, opposite ? opposite->flags : FLOW_FIN))
		flow_uncount(known->connection);
	else if (known->flags & FLOW_RST)
		flow_count(known->connection, known->backend);
}

#endif
