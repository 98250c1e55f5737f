/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The kernel's functions for conntrack (net/netfilter/nf_conntrack_bpf.c, nf_nat_bpf.c; all of them
 * since 6.1), and the fields of its entries that are read here.
 *
 * In BCC's dialect a call has a number instead of the function's BTF id, and a load an offset that
 * no struct here has: the loader replaces both by what the running kernel's BTF says
 * (programs/kfuncs.py reads these lines), so that the bytecode is the same for every kernel.
 */
#ifndef EBPFLB_ENGINE_CONNTRACK_KFUNCS_H
#define EBPFLB_ENGINE_CONNTRACK_KFUNCS_H

#include "compat.h"

/* 12 bytes are what every kernel takes (16 with a zone: from 6.11 on). */
struct ct_options {
	__s32 netns_id;
	__s32 error;
	__u8 protocol;
	__u8 direction;		/* of the packet that was looked up: IP_CT_DIR_ORIGINAL or _REPLY */
	__u8 pad[2];
};
_Static_assert(sizeof(struct ct_options) == 12, "the size of struct ct_options");


#define CURRENT_NETNS (-1)
#define DIRECTION_ORIGINAL 0

enum ct_manipulation { CT_SOURCE = 0, CT_DESTINATION = 1 };	/* enum nf_nat_manip_type */

/* enum tcp_conntrack: a connection that is over */
#define CT_TCP_TIME_WAIT 7
#define CT_TCP_CLOSE 8

/* enum ip_conntrack_status */
#define CT_STATUS_SEEN_REPLY (1 << 1)
#define CT_STATUS_ASSURED (1 << 2)	/* of TCP: the client has answered the backend */
#define CT_STATUS_DST_NAT (1 << 5)	/* IPS_DST_NAT: the destination is translated */
#define CT_STATUS_OFFLOAD (1 << 14)	/* in a flowtable: its packets pass conntrack by */

#if defined(DIALECT_BCC)

#define KFUNC(type, name, ...) \
	static type (*const name)(__VA_ARGS__) = (void *)KFUNC_NUMBER_##name;
#define FIELD(type, name, offset) \
	static __always_inline type name(const struct nf_conn *entry) \
	{ \
		__u64 value; \
		asm volatile("%0 = *(" #type " *)(%1 + " #offset ")" : "=r"(value) : "r"(entry)); \
		return value; \
	}
struct nf_conn;

#elif defined(DIALECT_NATIVE)

#define KFUNC(type, name, ...) type name(__VA_ARGS__);
#define FIELD(type, name, offset) __##type name(const struct nf_conn *entry);
struct nf_conn;

#else

#define KFUNC(type, name, ...) extern type name(__VA_ARGS__) __attribute__((section(".ksyms")));
#define FIELD(type, name, offset) \
	static __always_inline __##type name(const struct nf_conn *entry) \
	{ \
		return entry->name; \
	}
struct nf_conn {
	unsigned long ct_status;
	__u8 ct_tcp_state;
	__u16 ct_reply_port;
};

#endif

struct nf_conn___init;

KFUNC(struct nf_conn *, bpf_skb_ct_lookup,
      struct __sk_buff *ctx, struct bpf_sock_tuple *tuple, __u32 tuple_size,
      struct ct_options *options, __u32 options_size)
KFUNC(struct nf_conn___init *, bpf_skb_ct_alloc,
      struct __sk_buff *ctx, struct bpf_sock_tuple *tuple, __u32 tuple_size,
      struct ct_options *options, __u32 options_size)
KFUNC(int, bpf_ct_set_nat_info,
      struct nf_conn___init *entry, void *address, int port, enum ct_manipulation which)
KFUNC(void, bpf_ct_set_timeout, struct nf_conn___init *entry, __u32 milliseconds)
KFUNC(struct nf_conn *, bpf_ct_insert_entry, struct nf_conn___init *entry)
KFUNC(int, bpf_ct_change_timeout, struct nf_conn *entry, __u32 milliseconds)
KFUNC(void, bpf_ct_release, struct nf_conn *entry)

#ifdef RECORD
/* `ebpflb explain` changes nothing on the node: no entry expires by it. */
#define bpf_ct_change_timeout(entry, milliseconds) ((void)(entry))
#endif

FIELD(u64, ct_status, 0x7fe0)		/* nf_conn.status */
FIELD(u8, ct_tcp_state, 0x7ff0)		/* nf_conn.proto.tcp.state */
/* nf_conn.tuplehash[IP_CT_DIR_REPLY].tuple.dst.u.all: the port, in network order, of requests */
FIELD(u16, ct_reply_port, 0x7ff8)

#endif
