/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Whether the kernel's conntrack takes a flow of ours: run once, by BPF_PROG_TEST_RUN, in a network
 * namespace of its own. Returns PROBE_OK if the reply, with the translated addresses, finds the
 * entry; else the step that failed.
 */
#include "compat.h"
#include "engine/conntrack/create.h"
#include "path/tuple.h"

#define PROBE_OK 1
#define PROBE_NOT_MADE 2
#define PROBE_NOT_FOUND 3

/* Documentation's addresses (RFC 5737): nothing is sent to them. */
#define CLIENT 0xc0000201
#define FRONTEND 0xc0000202
#define BACKEND 0xc0000203
#define NODE 0xc0000204

PROGRAM("tc/ingress")
int conntrack_probe(struct __sk_buff *ctx)
{
	struct address backend = address_from_v4(BE32(BACKEND)), node = address_from_v4(BE32(NODE));
	struct tuple request = { .source = address_from_v4(BE32(CLIENT)),
				 .destination = address_from_v4(BE32(FRONTEND)),
				 .source_port = BE16(1000),
				 .destination_port = BE16(80),
				 .protocol = UDP };
	struct tuple translated = { .source = node,
				    .destination = backend,
				    .source_port = BE16(1000),
				    .destination_port = BE16(8080),
				    .protocol = UDP };
	struct tuple reply = tuple_reverse(&translated, 0);
	EMPTY(struct ct_key, key);
	EMPTY(struct ct_key, reply_key);
	__be16 source_port = 0;

	ct_key_write(key, &request);
	ct_key_write(reply_key, &reply);
	if (ct_create(ctx, key, &backend, BE16(8080), &node, &source_port) != CT_MADE ||
	    source_port != request.source_port)
		return PROBE_NOT_MADE;
	return ct_find(ctx, reply_key).translated ? PROBE_OK : PROBE_NOT_FOUND;
}

LICENSE("GPL")
