/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Ends a connection that no table remembers (core/connection.h). The agent runs this program by
 * BPF_PROG_TEST_RUN on a frame that has the connection's key in place of a payload. One call both
 * deletes the connection and counts its end, so an agent that is killed has done both or neither.
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
