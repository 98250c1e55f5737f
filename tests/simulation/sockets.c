/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The socket hooks over the maps of store.h: thousands of simulated calls without any Python.
 *
 * After a chosen number of look-ups of one call something else happens: ``meanwhile``, as the
 * agent's next write.
 */
#include "lookups.c"
#include "hooks/packet.c"
#include "engine/flows/expire.h"
#include "helpers.h"
#include "packets.h"

enum { AT_CONNECT, AT_SENDMSG, AT_RECVMSG, AT_GETPEERNAME, AT_RELEASE };
enum { IPV4, IPV6, MAPPED };	/* MAPPED: an IPv6 socket, to an IPv4 address */

/*
 * One call of one socket. The address is its last 32 bits; those of IPv6 all begin alike. The last
 * four are results: ``verdicts`` has a bit for each; ``strange``: an address that begins otherwise.
 */
struct socket_call {
	__u32 hook, type, protocol, state;
	__u64 netns, cookie;
	__u32 family, address, port;
	int allowed, retval, strange;
	__u32 verdicts;
};

static int run_hook(struct socket_call *call, struct bpf_sock_addr *ctx)
{
	struct bpf_sock sock = { .type = call->type, .protocol = call->protocol };
	int v6 = call->family != IPV4;

	switch (call->hook) {
	case AT_CONNECT:
		return v6 ? connect6(ctx) : connect4(ctx);
	case AT_SENDMSG:
		return v6 ? sendmsg6(ctx) : sendmsg4(ctx);
	case AT_RECVMSG:
		return v6 ? recvmsg6(ctx) : recvmsg4(ctx);
	case AT_GETPEERNAME:
		return v6 ? getpeername6(ctx) : getpeername4(ctx);
	default:
		return sock_release(&sock);
	}
}

static void write_destination(const struct socket_call *call, struct bpf_sock_addr *ctx)
{
	struct address address = address_of(call->family == IPV6, call->address);

	ctx->user_port = call->port;
	ctx->user_ip4 = call->address;
	memcpy(ctx->user_ip6, &address, sizeof(address));
}

static void read_destination(struct socket_call *call, const struct bpf_sock_addr *ctx)
{
	struct address address;

	call->port = ctx->user_port;
	call->address = ctx->user_ip4;
	call->strange = 0;
	if (call->family == IPV4)
		return;
	memcpy(&address, ctx->user_ip6, sizeof(address));
	call->address = address.word[3];
	call->strange = !address_is_plain(&address, call->family == IPV6);
}

void run(struct socket_call *call)
{
	struct bpf_sock itself = { .state = call->state };
	struct bpf_sock_addr ctx = { .type = call->type, .protocol = call->protocol };
	__u64 before[MOST_VERDICTS];

	ctx.sk = &itself;
	write_destination(call, &ctx);
	netns = call->netns;
	cookie = call->cookie;
	returned = 0;
	verdicts_keep(before);
	call->allowed = run_hook(call, &ctx);
	call->retval = returned;
	read_destination(call, &ctx);
	call->verdicts = verdicts_since(before);
}

/* The backend's address and port, or a verdict below zero. */
long long outcome_of(const struct socket_call *call)
{
	if (call->verdicts & 1 << VERDICT_TRANSLATED)
		return place_of_outcome(call->family == IPV6, call->strange, call->address,
					call->port);
	return verdict_outcome(call->verdicts);
}

/* As hooks/connection_end.c, which has the key from a packet. */
void end_connection(const void *key)
{
	connection_end(key);
}

/* As hooks/socket_end.c of a peer. */
int end_peer(const void *data)
{
	const struct ended_socket *ended = data;

	datagram_end(ended->socket, &ended->peer);
	return 0;
}

/* As hooks/flow_end.c. */
__u32 end_flow(const void *entries)
{
	struct flow resting ALIGNED;

	return flow_expire(entries, &resting);
}

/* Each is made by a socket of its own, which is closed then; every ``step``th, from ``first`` on. */
void run_all(const struct socket_call *calls, int count, int first, int step, __u64 first_cookie,
	     long long *outcomes)
{
	for (int i = first; i < count; i += step) {
		struct socket_call call = calls[i];

		call.cookie = first_cookie + i;
		run(&call);
		outcomes[i] = outcome_of(&call);
		call.hook = AT_RELEASE;
		run(&call);
	}
}
