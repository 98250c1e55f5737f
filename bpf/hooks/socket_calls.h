/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What the socket hooks of both families share: they turn a context into a request, and its verdict
 * into the hook's return value.
 */
#ifndef EBPFLB_HOOKS_SOCKET_CALLS_H
#define EBPFLB_HOOKS_SOCKET_CALLS_H

#include "hooks/socket_context.h"
#include "path/bind.h"
#include "path/reject_socket.h"
#include "path/socket.h"

#define ALLOW 1

/* On REWRITE the call goes to `backend` instead of `to`; both may be the same. */
static __always_inline enum answer translate(struct bpf_sock_addr *ctx, const enum call call,
					     struct address to, struct backend *backend)
{
	struct frontend frontend = { .address = to,
				     .port = ctx->user_port,
				     .protocol = socket_protocol(ctx->type, ctx->protocol) };
	struct request request = { .frontend = &frontend,
				   .socket = get_socket_cookie(ctx),
				   .netns = get_netns_cookie(ctx),
				   .is_connected = call == CONNECT || has_peer(ctx) };

	if (!frontend.protocol)
		return LEAVE;
	switch (socket_translate(&request, call, backend)) {
	case VERDICT_TRANSLATED:
		return REWRITE;
	case VERDICT_REFUSED:
		if (frontend.protocol == UDP && (call == CONNECT || !NAMES_ERRNO))
			return REWRITE;
		return reject_connection(&frontend, backend);
	case VERDICT_RECYCLED:
		return reject_connection(&frontend, backend);
	case VERDICT_NO_LOCAL_ENDPOINT:
	case VERDICT_SOURCE_DENIED:
	case VERDICT_UNALLOCATED:
		/* The packets are dropped at a device (egress_from_node; a pod's at ingress). */
		return address_is_own(&to, request.netns) ? drop_connection(&frontend, backend)
							  : LEAVE;
	default:
		return LEAVE;
	}
}

static __always_inline int translate_v4(struct bpf_sock_addr *ctx, const enum call call)
{
	struct backend backend = {};
	enum answer answer = translate(ctx, call, address_from_v4(ctx->user_ip4), &backend);

	if (answer == REWRITE)
		write_v4(ctx, &backend.address, backend.port);
	return answer != DENY;
}

static __always_inline int translate_v6(struct bpf_sock_addr *ctx, const enum call call)
{
	struct backend backend = {};
	enum answer answer = translate(ctx, call, read_v6(ctx), &backend);

	if (answer == REWRITE)
		write_v6(ctx, &backend.address, backend.port);
	return answer != DENY;
}

/* These hooks cannot deny anything: the kernel accepts no other return value than ALLOW. */
static __always_inline struct peer_frontend *translate_reply(struct bpf_sock_addr *ctx,
							     const enum call call,
							     struct address from)
{
	__u8 protocol = socket_protocol(ctx->type, ctx->protocol);
	struct peer peer = { .socket = get_socket_cookie(ctx),
			     .address = from,
			     .port = ctx->user_port };

	return protocol ? socket_translate_reply(&peer, call, protocol, has_peer(ctx)) : NULL;
}

static __always_inline int translate_reply_v4(struct bpf_sock_addr *ctx,
					      const enum call call)
{
	struct peer_frontend *found = translate_reply(ctx, call, address_from_v4(ctx->user_ip4));

	if (found)
		write_v4(ctx, &found->frontend.address, found->frontend.port);
	return ALLOW;
}

static __always_inline int translate_reply_v6(struct bpf_sock_addr *ctx,
					      const enum call call)
{
	struct peer_frontend *found = translate_reply(ctx, call, read_v6(ctx));

	if (found)
		write_v6(ctx, &found->frontend.address, found->frontend.port);
	return ALLOW;
}

/* src_port is in host order in this context alone. */
static __always_inline int guard_bind(struct bpf_sock *ctx, struct address address)
{
	struct frontend local = { .address = address,
				  .port = BE16((__u16)ctx->src_port),
				  .protocol = socket_protocol(ctx->type, ctx->protocol) };

	return !local.protocol || bind_answer(&local, get_netns_cookie(ctx)) != DENY;
}

#endif
