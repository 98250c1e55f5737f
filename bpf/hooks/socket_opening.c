/* SPDX-License-Identifier: GPL-2.0 */
/*
 * With --endpoint-health, or the annotation rebalance: whether the TCP connections of sockets to backends
 * open. The agent attaches this program to the cgroup while it runs.
 *
 * A connection fails when its first SYN has no answer for a second, or when it is refused. A socket
 * that its owner closes before has neither failed nor opened: its SYN is still under way.
 */
#include "compat.h"
#include "core/endpoint_health.h"
#include "maps.h"
#include "net/header.h"
#include "sockets/place.h"

#define SEEN 1

/* The connection of a socket that connect() gave a backend, or NULL. */
static __always_inline struct socket_entry *connection_of(struct bpf_sock_ops *ctx)
{
	struct socket_entry *entry = socket_find(get_socket_cookie(ctx));

	return entry && entry->peer.frontend.protocol == TCP ? entry : NULL;
}

static __always_inline struct service_client client_of(const struct socket_entry *entry)
{
	return (struct service_client){ .client = entry->netns, .service = entry->service };
}

/* Also tells the agent, while connections of the service move (ebpflb/agent/rebalance.py). */
static __always_inline void opening_failed(const struct service_client *client, __u32 backend)
{
	__u64 *failed = LOOKUP(__u64, failed_openings, &client->service);

	if (failed)
		__sync_fetch_and_add(failed, 1);
	endpoint_failed(client, backend);
}

/* All fields are read before they are compared: else clang reads one by a pointer that the verifier refuses. */
static __always_inline bool has_failed(struct bpf_sock_ops *ctx)
{
	__u32 op = ctx->op, state, from, to, in_flight;

	if (op != BPF_SOCK_OPS_RTO_CB && op != BPF_SOCK_OPS_STATE_CB)
		return false;
	state = ctx->state;
	from = ctx->args[0];
	to = ctx->args[1];
	in_flight = ctx->packets_out;
	OPAQUE(state);
	OPAQUE(from);
	OPAQUE(to);
	OPAQUE(in_flight);
	if (op == BPF_SOCK_OPS_RTO_CB)
		return state == BPF_TCP_SYN_SENT;
	return from == BPF_TCP_SYN_SENT && to == BPF_TCP_CLOSE && !in_flight;
}

PROGRAM("sockops")
int socket_opening(struct bpf_sock_ops *ctx)
{
	bool begins = ctx->op == BPF_SOCK_OPS_TCP_CONNECT_CB;
	bool opened = ctx->op == BPF_SOCK_OPS_ACTIVE_ESTABLISHED_CB;
	struct socket_entry *entry;
	struct service_client client;

	if (!begins && !opened && !has_failed(ctx))
		return SEEN;
	entry = connection_of(ctx);
	if (!entry)
		return SEEN;
	client = client_of(entry);
	if (begins)
		bpf_sock_ops_cb_flags_set(ctx, ctx->bpf_sock_ops_cb_flags |
						       BPF_SOCK_OPS_RTO_CB_FLAG |
						       BPF_SOCK_OPS_STATE_CB_FLAG);
	else if (opened)
		endpoint_opened(&client, entry->peer.backend);
	else
		opening_failed(&client, entry->peer.backend);
	return SEEN;
}

LICENSE("GPL")
