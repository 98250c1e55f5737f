/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Ends sockets whose connections are to move (sockets/quiet.h). The agent runs it over the TCP sockets of a
 * network namespace; the kernel holds each socket's lock meanwhile, so neither its owner nor a segment
 * comes between the decision and the end. Linux 6.5.
 */
#include "compat.h"
#include "maps.h"
#include "sockets/quiet.h"

/* struct bpf_iter__tcp: its first two pointers. */
struct tcp_iteration {
	void *meta;
	void *socket;
};

#ifdef DIALECT_NATIVE
long read_kernel(void *to, __u32 size, const void *from);
void *skc_to_tcp_sock(void *socket);
int sock_destroy(void *socket);
#else
static void *(*const skc_to_tcp_sock)(void *socket) = (void *)137;
static int (*const sock_destroy)(void *socket) = (void *)KERNEL_SOCK_DESTROY;
#endif

/* A load that the agent finds. */
#ifdef DIALECT_BCC
#define KERNEL_NUMBER(place) bpf_pseudo_fd(0, place)
#else
#define KERNEL_NUMBER(place) (place)
#endif

#define FIELD(type, name) ({ \
	type value_ = 0; \
	read_kernel(&value_, sizeof(value_), tcp + KERNEL_NUMBER(KERNEL_##name)); \
	value_; \
})

static __always_inline struct tcp_numbers numbers_of(const void *tcp)
{
	return (struct tcp_numbers){ .state = FIELD(__u8, STATE),
				     .sent = FIELD(__u32, WRITE_SEQ),
				     .acknowledged = FIELD(__u32, SND_UNA),
				     .received = FIELD(__u32, RCV_NXT),
				     .read = FIELD(__u32, COPIED_SEQ),
				     .acknowledged_by = FIELD(__u32, SND_WL1),
				     .last_sent = FIELD(__u32, LSNDTIME),
				     .last_received = FIELD(__u32, LRCVTIME),
				     .backlog = FIELD(__u64, BACKLOG),
				     .out_of_order = FIELD(__u64, OUT_OF_ORDER),
				     .user_data = FIELD(__u64, USER_DATA),
				     .ulp = FIELD(__u64, ULP_OPS) };
}

PROGRAM("iter/tcp")
int quiet_socket(struct tcp_iteration *ctx)
{
	void *socket = ctx->socket, *tcp;
	struct quiet_socket *found;
	struct tcp_numbers now;
	__u64 cookie;

	if (!socket)
		return 0;
	cookie = get_socket_cookie(socket);
	found = LOOKUP(struct quiet_socket, quiet_sockets, &cookie);
	tcp = found ? skc_to_tcp_sock(socket) : NULL;
	if (!tcp)
		return 0;
	now = numbers_of(tcp);
	if (quiet_look(found, &now, bpf_ktime_get_ns()) && !sock_destroy(socket))
		found->state = QUIET_ENDED;
	return 0;
}

LICENSE("GPL")
