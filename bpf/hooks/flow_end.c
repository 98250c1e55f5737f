/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Removes an expired flow (engine/flows/expire.h). The agent runs this program by BPF_PROG_TEST_RUN on a
 * frame that has the flow's entries in place of a payload.
 */
#include "compat.h"
#include "engine/flows/expire.h"
#include "net/header.h"

PROGRAM("tc/ingress")
int flow_ending(struct __sk_buff *ctx)
{
	struct expired_entry entries[FLOW_ENTRIES];
	struct flow resting ALIGNED;

	if (bpf_skb_load_bytes(ctx, LINK, entries, sizeof(entries)))
		return 0;
	return flow_expire(entries, &resting);
}

LICENSE("GPL")
