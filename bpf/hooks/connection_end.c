/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Ends a connection that nothing remembers (core/connection.h), for the agent: run by
 * BPF_PROG_TEST_RUN on a frame that has the connection's key in place of a payload. So one call
 * deletes it and counts that, and an agent that is killed has done both or nothing.
 */
#include "compat.h"
#include "core/connection.h"
#include "net/header.h"

PROGRAM("tc/ingress")
int connection_ending(struct __sk_buff *ctx)
{
	struct assignment_key key = {};

	if (!bpf_skb_load_bytes(ctx, LINK, &key, sizeof(key)))
		connection_end(&key);
	return 0;
}

LICENSE("GPL")
