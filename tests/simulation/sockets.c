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
struct attempt {
	__u32 hook, type, protocol, state;
	__u64 netns, cookie;
	__u32 family, address, port;
	int allowed, retval, strange;
	__u32 verdicts;
};

static int run_hook(struct attempt *attempt, struct bpf_sock_addr *ctx)
{
	struct bpf_sock sock = { .type = attempt->type, .protocol = attempt->protocol };
	int v6 = attempt->family != IPV4;

	switch (attempt->hook) {
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

static void write_destination(const struct attempt *attempt, struct bpf_sock_addr *ctx)
{
	struct address address = address_of(attempt->family == IPV6, attempt->address);

	ctx->user_port = attempt->port;
	ctx->user_ip4 = attempt->address;
	memcpy(ctx->user_ip6, &address, sizeof(address));
}

static void read_destination(struct attempt *attempt, const struct bpf_sock_addr *ctx)
{
	struct address address;

	attempt->port = ctx->user_port;
	attempt->address = ctx->user_ip4;
	attempt->strange = 0;
	if (attempt->family == IPV4)
		return;
	memcpy(&address, ctx->user_ip6, sizeof(address));
	attempt->address = address.word[3];
	attempt->strange = !address_is_plain(&address, attempt->family == IPV6);
}

void run(struct attempt *attempt)
{
	struct bpf_sock itself = { .state = attempt->state };
	struct bpf_sock_addr ctx = { .type = attempt->type, .protocol = attempt->protocol };
	__u64 before[MOST_VERDICTS];

	ctx.sk = &itself;
	write_destination(attempt, &ctx);
	netns = attempt->netns;
	cookie = attempt->cookie;
	returned = 0;
	verdicts_keep(before);
	attempt->allowed = run_hook(attempt, &ctx);
	attempt->retval = returned;
	read_destination(attempt, &ctx);
	attempt->verdicts = verdicts_since(before);
}

/* The backend's address and port, or a verdict below zero. */
long long outcome_of(const struct attempt *attempt)
{
	if (attempt->verdicts & 1 << VERDICT_TRANSLATED)
		return place_of_outcome(attempt->family == IPV6, attempt->strange, attempt->address,
					attempt->port);
	return verdict_outcome(attempt->verdicts);
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

	const struct expired_entry *first = entries;

	if (first->end == ENTRY_GONE)
		return flow_mark_gone(first);
	return flow_expire(entries, &resting);
}

/* Each is made by a socket of its own, which is closed then; every ``step``th, from ``first`` on. */
void run_all(const struct attempt *attempts, int count, int first, int step, __u64 first_cookie,
	     long long *outcomes)
{
	for (int i = first; i < count; i += step) {
		struct attempt attempt = attempts[i];

		attempt.cookie = first_cookie + i;
		run(&attempt);
		outcomes[i] = outcome_of(&attempt);
		attempt.hook = AT_RELEASE;
		run(&attempt);
	}
}
