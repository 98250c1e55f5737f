/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Tells the agent the cookie of its own network namespace, on kernels that have no
 * SO_NETNS_COOKIE (before 5.14). Attached for a moment, and only while it asks: to a socket that
 * carries the mark, getsockname() answers with the cookie's low 48 bits, which count namespaces,
 * as address and port.
 */
#include "compat.h"

#define ALLOW 1
#define WITNESS 0x65626c62

PROGRAM("cgroup/getsockname4")
int witness(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *socket = ctx->sk;
	__u64 cookie = get_netns_cookie(ctx);

	if (!socket || socket->mark != WITNESS)
		return ALLOW;
	ctx->user_ip4 = (__u32)cookie;
	ctx->user_port = (__u16)(cookie >> 32);
	return ALLOW;
}

LICENSE("GPL")
