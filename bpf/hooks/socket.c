/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The hooks at the sockets of a cgroup.
 *
 *   connect, sendmsg      the application names a frontend; the kernel talks to the backend
 *   recvmsg, getpeername  the kernel names the backend; the application sees the frontend
 *   post_bind             binding to a NodePort fails
 *   sock_release          the data remembered about the socket is deleted
 */
#include "compat.h"
#include "maps.h"
#include "hooks/socket_calls.h"

PROGRAM("cgroup/connect4")
int connect4(struct bpf_sock_addr *ctx)
{
	struct frontend frontend = frontend_v4(ctx);
	struct request request = request_of(ctx, CONNECT, &frontend);
	struct backend backend = {};

	return answer_v4(ctx, socket_translate(&request, CONNECT, &backend), &backend);
}

PROGRAM("cgroup/connect6")
int connect6(struct bpf_sock_addr *ctx)
{
	struct frontend frontend = frontend_v6(ctx);
	struct request request = request_of(ctx, CONNECT, &frontend);
	struct backend backend = {};

	return answer_v6(ctx, socket_translate(&request, CONNECT, &backend), &backend);
}

PROGRAM("cgroup/sendmsg4")
int sendmsg4(struct bpf_sock_addr *ctx)
{
	struct frontend frontend = frontend_v4(ctx);
	struct request request = request_of(ctx, SENDMSG, &frontend);
	struct backend backend = {};

	return answer_v4(ctx, socket_translate(&request, SENDMSG, &backend), &backend);
}

PROGRAM("cgroup/sendmsg6")
int sendmsg6(struct bpf_sock_addr *ctx)
{
	struct frontend frontend = frontend_v6(ctx);
	struct request request = request_of(ctx, SENDMSG, &frontend);
	struct backend backend = {};

	return answer_v6(ctx, socket_translate(&request, SENDMSG, &backend), &backend);
}

PROGRAM("cgroup/recvmsg4")
int recvmsg4(struct bpf_sock_addr *ctx)
{
	return translate_reply_v4(ctx, RECVMSG);
}

PROGRAM("cgroup/recvmsg6")
int recvmsg6(struct bpf_sock_addr *ctx)
{
	return translate_reply_v6(ctx, RECVMSG);
}

PROGRAM("cgroup/getpeername4")
int getpeername4(struct bpf_sock_addr *ctx)
{
	return translate_reply_v4(ctx, GETPEERNAME);
}

PROGRAM("cgroup/getpeername6")
int getpeername6(struct bpf_sock_addr *ctx)
{
	return translate_reply_v6(ctx, GETPEERNAME);
}

PROGRAM("cgroup/post_bind4")
int post_bind4(struct bpf_sock *ctx)
{
	return guard_bind(ctx, address_from_v4(ctx->src_ip4));
}

PROGRAM("cgroup/post_bind6")
int post_bind6(struct bpf_sock *ctx)
{
	return guard_bind(ctx, read_source_v6(ctx));
}

PROGRAM("cgroup/sock_release")
int sock_release(struct bpf_sock *ctx)
{
	__u8 protocol = socket_protocol(ctx->type, ctx->protocol);

	if (protocol == TCP)
		stream_release(get_socket_cookie(ctx));
	else if (protocol == UDP)
		datagram_release(get_socket_cookie(ctx));
	return ALLOW;
}

LICENSE("GPL")
