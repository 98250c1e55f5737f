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
#include "path/bind.h"
#include "path/reject.h"
#include "path/serve.h"
#include "hooks/decode.h"

#define ALLOW 1

/* Way out. REWRITE names in backend where the socket goes instead of to. */
static __always_inline enum answer ask(struct bpf_sock_addr *ctx, struct address to,
				       struct backend *backend)
{
	struct request request = {
		.to = { .address = to,
			.port = ctx->user_port,
			.protocol = socket_protocol(ctx->type, ctx->protocol) },
		.socket = get_socket_cookie(ctx),
		.netns = get_netns_cookie(ctx),
	};

	if (!request.to.protocol)
		return LEAVE;
	switch (serve(&request, backend)) {
	case VERDICT_TRANSLATED:
		return REWRITE;
	case VERDICT_REFUSED:
	case VERDICT_SLOT_LOST:
		return reject_connection(&request.to, backend);
	default:
		return LEAVE;
	}
}

static __always_inline int ask_v4(struct bpf_sock_addr *ctx)
{
	struct backend backend = {};
	struct address to = address_from_v4(ctx->user_ip4);
	enum answer answer = ask(ctx, to, &backend);

	if (answer == REWRITE)
		write_v4(ctx, &backend.address, backend.port);
	return answer != DENY;
}

static __always_inline int ask_v6(struct bpf_sock_addr *ctx)
{
	struct backend backend = {};
	enum answer answer = ask(ctx, read_v6(ctx), &backend);

	if (answer == REWRITE)
		write_v6(ctx, &backend.address, backend.port);
	return answer != DENY;
}

/* Way back. The kernel takes no "no" here. */
static __always_inline struct origin *restore(struct bpf_sock_addr *ctx, struct address from)
{
	__u8 protocol = socket_protocol(ctx->type, ctx->protocol);
	struct peer peer = { .socket = get_socket_cookie(ctx),
			     .address = from,
			     .port = ctx->user_port };

	return protocol ? serve_restore(&peer, protocol) : NULL;
}

static __always_inline int restore_v4(struct bpf_sock_addr *ctx)
{
	struct origin *origin = restore(ctx, address_from_v4(ctx->user_ip4));

	if (origin)
		write_v4(ctx, &origin->frontend.address, origin->frontend.port);
	return ALLOW;
}

static __always_inline int restore_v6(struct bpf_sock_addr *ctx)
{
	struct origin *origin = restore(ctx, read_v6(ctx));

	if (origin)
		write_v6(ctx, &origin->frontend.address, origin->frontend.port);
	return ALLOW;
}

/* src_port is in host order in this context alone. */
static __always_inline int guard(struct bpf_sock *ctx, struct address address)
{
	struct frontend local = { .address = address,
				  .port = BE16((__u16)ctx->src_port),
				  .protocol = socket_protocol(ctx->type, ctx->protocol) };

	return !local.protocol || bind_answer(&local, get_netns_cookie(ctx)) != DENY;
}

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
