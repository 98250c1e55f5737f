/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The doors at the sockets of a cgroup: each decodes its context, asks path/ once, and answers.
 *
 *   connect, sendmsg      the application names a frontend; the kernel talks to the backend
 *   recvmsg, getpeername  the kernel names the backend; the application sees the frontend
 *   post_bind             a NodePort is nobody's to bind
 *   sock_release          what we remembered of the socket goes
 */
#include "compat.h"
#include "maps.h"
#include "hooks/socket_calls.h"

PROGRAM("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx)
{
	return ask_v4(ctx);
}

PROGRAM("cgroup/connect6")
int connect6(struct bpf_sock_addr *ctx)
{
	return ask_v6(ctx);
}

PROGRAM("cgroup/sendmsg4")
int sendmsg4(struct bpf_sock_addr *ctx)
{
	return ask_v4(ctx);
}

PROGRAM("cgroup/sendmsg6")
int sendmsg6(struct bpf_sock_addr *ctx)
{
	return ask_v6(ctx);
}

PROGRAM("cgroup/recvmsg4")
int recvmsg4(struct bpf_sock_addr *ctx)
{
	return restore_v4(ctx);
}

PROGRAM("cgroup/recvmsg6")
int recvmsg6(struct bpf_sock_addr *ctx)
{
	return restore_v6(ctx);
}

PROGRAM("cgroup/getpeername4")
int getpeername4(struct bpf_sock_addr *ctx)
{
	return restore_v4(ctx);
}

PROGRAM("cgroup/getpeername6")
int getpeername6(struct bpf_sock_addr *ctx)
{
	return restore_v6(ctx);
}

PROGRAM("cgroup/post_bind4")
int post_bind4(struct bpf_sock *ctx)
{
	return guard(ctx, address_from_v4(ctx->src_ip4));
}

PROGRAM("cgroup/post_bind6")
int post_bind6(struct bpf_sock *ctx)
{
	return guard(ctx, read_source_v6(ctx));
}

PROGRAM("cgroup/sock_release")
int sock_release(struct bpf_sock *ctx)
{
	__u8 protocol = socket_protocol(ctx->type, ctx->protocol);

	if (protocol == TCP)
		stream_forget(get_socket_cookie(ctx));
	else if (protocol == UDP)
		datagram_forget(get_socket_cookie(ctx));
	return ALLOW;
}

LICENSE("GPL")
