/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Between the doors and the path: one question a hook, put in our words, and what the answer
 * means in the kernel's.
 */
#ifndef EBPFLB_HOOKS_SOCKET_CALLS_H
#define EBPFLB_HOOKS_SOCKET_CALLS_H

#include "hooks/socket_context.h"
#include "path/bind.h"
#include "path/reject_socket.h"
#include "path/socket.h"

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
	case VERDICT_RECYCLED:
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
static __always_inline struct peer_frontend *restore(struct bpf_sock_addr *ctx, struct address from)
{
	__u8 protocol = socket_protocol(ctx->type, ctx->protocol);
	struct peer peer = { .socket = get_socket_cookie(ctx),
			     .address = from,
			     .port = ctx->user_port };

	return protocol ? serve_restore(&peer, protocol) : NULL;
}

static __always_inline int restore_v4(struct bpf_sock_addr *ctx)
{
	struct peer_frontend *origin = restore(ctx, address_from_v4(ctx->user_ip4));

	if (origin)
		write_v4(ctx, &origin->frontend.address, origin->frontend.port);
	return ALLOW;
}

static __always_inline int restore_v6(struct bpf_sock_addr *ctx)
{
	struct peer_frontend *origin = restore(ctx, read_v6(ctx));

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

#endif
