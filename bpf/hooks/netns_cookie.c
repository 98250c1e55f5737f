/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Tells the agent the cookie of its own network namespace, on kernels without SO_NETNS_COOKIE
 * (before 5.14). The program is attached only for that query. It changes the result of
 * getsockname() on a socket that carries the mark: address and port become the cookie's low
 * 48 bits, which count namespaces.
 */
#include "compat.h"

#define ALLOW 1
#define COOKIE_MARK 0x65626c62

PROGRAM("cgroup/getsockname4")
int netns_cookie(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *socket = ctx->sk;
	__u64 cookie = get_netns_cookie(ctx);

	if (!socket || socket->mark != COOKIE_MARK)
		return ALLOW;
	ctx->user_ip4 = (__u32)cookie;
	ctx->user_port = (__u16)(cookie >> 32);
	return ALLOW;
}

LICENSE("GPL")
