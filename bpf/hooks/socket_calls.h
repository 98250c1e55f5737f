/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The part that the socket hooks of both families share: they turn a context into a request, and
 * the answer into the hook's return value.
 */
#ifndef EBPFLB_HOOKS_SOCKET_CALLS_H
#define EBPFLB_HOOKS_SOCKET_CALLS_H

#include "hooks/socket_context.h"
#include "path/socket.h"
#include "record/event_call.h"
#include "sockets/reject.h"

#define ALLOW 1

static __always_inline struct frontend frontend_v4(struct bpf_sock_addr *ctx)
{
	return (struct frontend){ .address = address_from_v4(ctx->user_ip4),
				  .port = ctx->user_port,
				  .protocol = socket_protocol(ctx->type, ctx->protocol) };
}

static __always_inline struct frontend frontend_v6(struct bpf_sock_addr *ctx)
{
	return (struct frontend){ .address = read_v6(ctx),
				  .port = ctx->user_port,
				  .protocol = socket_protocol(ctx->type, ctx->protocol) };
}

static __always_inline struct request request_of(struct bpf_sock_addr *ctx, const enum call call,
						 const struct frontend *frontend)
{
	struct request request = { .frontend = frontend,
				   .socket = get_socket_cookie(ctx),
				   .netns = get_netns_cookie(ctx),
				   .is_connected = call == CONNECT || has_peer(ctx),
				   .begun = monitor_time() };

	if (call != CONNECT)
		FORGET_VALUE(request.is_connected, request.socket);
	return request;
}

/* Returns the hook's return value. */
static __always_inline int answer_v4(struct bpf_sock_addr *ctx, enum answer answer,
				     const struct backend *backend)
{
	if (answer == REWRITE)
		write_v4(ctx, &backend->address, backend->port);
	return answer != DENY;
}

static __always_inline int answer_v6(struct bpf_sock_addr *ctx, enum answer answer,
				     const struct backend *backend)
{
	if (answer == REWRITE)
		write_v6(ctx, &backend->address, backend->port);
	return answer != DENY;
}

/* Translates a reply. These hooks cannot deny anything: the kernel only accepts ALLOW. */
static __always_inline struct peer_frontend *translate_reply(struct bpf_sock_addr *ctx,
							     const enum call call,
							     struct address from)
{
	__u8 protocol = socket_protocol(ctx->type, ctx->protocol);
	struct peer peer = { .socket = get_socket_cookie(ctx),
			     .address = from,
			     .port = ctx->user_port };

	monitor_begin(begun);
	return monitor_reply(ctx, call, begun,
			     protocol ? socket_translate_reply(&peer, call, protocol, has_peer(ctx))
				      : NULL);
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

/* Guards bind(). Only in this context src_port is in host order. */
static __always_inline int guard_bind(struct bpf_sock *ctx, struct address address)
{
	struct frontend local = { .address = address,
				  .port = BE16((__u16)ctx->src_port),
				  .protocol = socket_protocol(ctx->type, ctx->protocol) };

	monitor_begin(begun);
	return monitor_bind(ctx, &local, begun,
			    !local.protocol || bind_answer(&local, get_netns_cookie(ctx),
							   takes_v4(ctx)) != DENY);
}

#endif
