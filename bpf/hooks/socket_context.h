/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Converts the fields of a socket hook's context to this project's types, and back. Ports in the
 * context are 32 bits wide, with network order in the low half.
 */
#ifndef EBPFLB_HOOKS_SOCKET_CONTEXT_H
#define EBPFLB_HOOKS_SOCKET_CONTEXT_H

#include "compat.h"
#include "layout.h"
#include "net/header.h"

#define STREAM 1
#define DATAGRAM 2
#define ESTABLISHED 1	/* TCP_ESTABLISHED */
#define SOCK_FAMILY 16	/* offset of skc_family, skc_state, and a byte with skc_ipv6only */
#define SOCK_V6ONLY 32

/* Returns TCP (also for MPTCP) or UDP, or 0 for any other socket: the hooks ignore those. */
static __always_inline __u8 socket_protocol(__u32 type, __u32 protocol)
{
	if (type == STREAM && (protocol == TCP || protocol == MPTCP))
		return TCP;
	return type == DATAGRAM && protocol == UDP ? UDP : 0;
}

/*
 * Whether the socket has a peer. Datagram sockets are "established" from connect() until connect()
 * to AF_UNSPEC. A stream socket has a peer in other states too, and the hooks are never called on a
 * stream socket without a peer.
 */
static __always_inline bool has_peer(struct bpf_sock_addr *ctx)
{
	struct bpf_sock *socket = ctx->sk;

	return ctx->type == STREAM || (socket && socket->state == ESTABLISHED);
}

/* Reads four words: kernel 5.10 allows no other access to user_ip6. */
static __always_inline struct address read_v6(struct bpf_sock_addr *ctx)
{
	return (struct address){ .word = { ctx->user_ip6[0], ctx->user_ip6[1],
					   ctx->user_ip6[2], ctx->user_ip6[3] } };
}

static __always_inline void write_v4(struct bpf_sock_addr *ctx, const struct address *address,
				     __be16 port)
{
	ctx->user_ip4 = address->word[3];
	ctx->user_port = port;
}

static __always_inline void write_v6(struct bpf_sock_addr *ctx, const struct address *address,
				     __be16 port)
{
	ctx->user_ip6[0] = address->word[0];
	ctx->user_ip6[1] = address->word[1];
	ctx->user_ip6[2] = address->word[2];
	ctx->user_ip6[3] = address->word[3];
	ctx->user_port = port;
}

static __always_inline struct address read_source_v6(struct bpf_sock *ctx)
{
	return (struct address){ .word = { ctx->src_ip6[0], ctx->src_ip6[1],
					   ctx->src_ip6[2], ctx->src_ip6[3] } };
}

/*
 * Whether a socket that is bound to :: also takes IPv4: not with IPV6_V6ONLY. The context does not
 * tell, but it is the kernel's own struct sock, which begins with struct sock_common
 * (-DHAVE_KERNEL_READ).
 */
static __always_inline bool takes_v4(struct bpf_sock *ctx)
{
#ifdef HAVE_KERNEL_READ
	struct { __u16 family; __u8 state; __u8 flags; } common = {};

	read_kernel(&common, sizeof(common), (void *)ctx + SOCK_FAMILY);
	return common.family != ctx->family || !(common.flags & SOCK_V6ONLY);
#else
	return true;
#endif
}

#endif
