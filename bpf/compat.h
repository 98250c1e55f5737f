/* SPDX-License-Identifier: GPL-2.0 */
/*
 * One dialect for three compilers. BCC makes the bytecode that runs (-DDIALECT_BCC), clang with
 * libbpf reads the same files for editors, analysers and bpftool, and gcc compiles them into a
 * library for unit tests (-DDIALECT_NATIVE), where the test supplies maps and helpers.
 *
 * The bytecode has no globals, no calls between functions and no tables: the loader relocates
 * map references and nothing else. Hence everything is static __always_inline.
 */
#ifndef EBPFLB_COMPAT_H
#define EBPFLB_COMPAT_H

#if defined(DIALECT_BCC)

/* The agent creates the maps; -DMAP_NUMBER_<name>= tells which reference to patch. */
#define PROGRAM(section)
#define LICENSE(text)
#define DEFINE_MAP(name, kind, key, value, entries, flags) enum { ENTRIES_##name = entries };
#define MAP(name) ((void *)bpf_pseudo_fd(1, MAP_NUMBER_##name))
#define ONLY_VALUE(type, map) ((type *)bpf_pseudo_fd(2, MAP_NUMBER_##map))

/*
 * Writes `new` if the value is `old`, and returns the former value; a full memory barrier. BCC cannot
 * compile this instruction, so the loader puts it in place of the call. CAN_EXCHANGE is a constant that
 * the loader sets; where it is 0 (Linux 5.10) the verifier never sees the call.
 */
#define CAN_EXCHANGE (bpf_pseudo_fd(1, EXCHANGE_NUMBER) != 0)
static __u64 (*const compare_exchange)(__u64 *at, __u64 old, __u64 new) = (void *)EXCHANGE_NUMBER;

#elif defined(DIALECT_NATIVE)

#include <linux/bpf.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#define PROGRAM(section)
#define LICENSE(text)
#define DEFINE_MAP(name, kind, key, value, entries, flags) \
	static char name[] __attribute__((unused)) = #name; \
	enum { ENTRIES_##name = entries };
#define MAP(name) ((void *)name)

void *bpf_map_lookup_elem(void *map, const void *key);
long bpf_map_update_elem(void *map, const void *key, const void *value, __u64 flags);
long bpf_map_delete_elem(void *map, const void *key);
long bpf_ringbuf_output(void *ring, void *data, __u64 size, __u64 flags);
__u64 bpf_ktime_get_ns(void);
__u64 jiffies64(void);
__u32 bpf_get_prandom_u32(void);
__u32 bpf_get_smp_processor_id(void);
static inline void bpf_spin_lock(struct bpf_spin_lock *lock) {}
static inline void bpf_spin_unlock(struct bpf_spin_lock *lock) {}
#ifdef HAVE_SET_RETVAL
#define CAN_EXCHANGE true
#else
#define CAN_EXCHANGE false
#endif
#define compare_exchange __sync_val_compare_and_swap
long bpf_skb_load_bytes(const void *ctx, __u32 offset, void *to, __u32 size);
long bpf_skb_store_bytes(struct __sk_buff *ctx, __u32 offset, const void *from, __u32 size,
			 __u64 flags);
long bpf_skb_vlan_pop(struct __sk_buff *ctx);
long bpf_skb_change_tail(struct __sk_buff *ctx, __u32 size, __u64 flags);
long bpf_l3_csum_replace(struct __sk_buff *ctx, __u32 at, __u64 from, __u64 to, __u64 flags);
long bpf_l4_csum_replace(struct __sk_buff *ctx, __u32 at, __u64 from, __u64 to, __u64 flags);
__s64 bpf_csum_diff(__be32 *from, __u32 from_size, __be32 *to, __u32 to_size, __u32 seed);
long bpf_fib_lookup(void *ctx, struct bpf_fib_lookup *params, int size, __u32 flags);
long bpf_redirect(__u32 ifindex, __u64 flags);
long redirect_neigh(__u32 ifindex, void *next, int size, __u64 flags);
#ifndef EBPFLB_NO_SOCKET
__u64 get_netns_cookie(void *ctx);
__u64 get_socket_cookie(void *ctx);
int set_retval(int retval);
#endif
int bpf_sock_ops_cb_flags_set(struct bpf_sock_ops *ctx, int flags);

#else

#include <linux/bpf.h>
#include <stdbool.h>
#include <stddef.h>
#include <bpf/bpf_helpers.h>
#define PROGRAM(section) SEC(section)
#define LICENSE(text) char _license[] SEC("license") = text;
#define DEFINE_MAP(name, kind, key_type, value_type, entries, flags) \
	struct { \
		__uint(type, BPF_MAP_TYPE_##kind); \
		__type(key, key_type); \
		__type(value, value_type); \
		__uint(max_entries, entries); \
		__uint(map_flags, flags); \
	} name SEC(".maps"); \
	enum { ENTRIES_##name = entries };
#define BPF_MAP_TYPE_CPU_ARRAYS BPF_MAP_TYPE_ARRAY
#define MAP(name) ((void *)&name)
#define NONE 0
#define RDONLY_PROG BPF_F_RDONLY_PROG
#define MMAPABLE BPF_F_MMAPABLE
#define NO_PREALLOC BPF_F_NO_PREALLOC
#define CAN_EXCHANGE false
static inline __u64 compare_exchange(__u64 *at, __u64 old, __u64 new)
{
	return old;
}

#endif

#undef __always_inline
#define __always_inline inline __attribute__((always_inline))

#ifdef EBPFLB_NO_SOCKET
/* hooks/explain.c has no socket: it answers in place of these helpers. */
static __always_inline __u64 get_netns_cookie(void *ctx);
static __always_inline __u64 get_socket_cookie(void *ctx);
static __always_inline int set_retval(int retval);
#elif !defined(DIALECT_NATIVE)
/* Declared here because BCC's own get_socket_cookie returns 32 of the 64 bits. */
static __u64 (*const get_netns_cookie)(void *ctx) = (void *)122;
static __u64 (*const get_socket_cookie)(void *ctx) = (void *)46;
#ifdef HAVE_SET_RETVAL
static int (*const set_retval)(int retval) = (void *)187;
#endif
#endif

#ifndef DIALECT_NATIVE
/* BCC declares bpf_redirect_neigh with three parameters; the kernel has four. */
static long (*const redirect_neigh)(__u32 ifindex, void *next, int size, __u64 flags) = (void *)152;
static __u64 (*const jiffies64)(void) = (void *)118;
static long (*const read_kernel)(void *to, __u32 size, const void *from) = (void *)113;
#ifdef HAVE_COARSE_CLOCK
static __u64 (*const clock_coarse)(void) = (void *)160;
#endif
#endif

/* CLOCK_MONOTONIC as of the last tick, where the kernel has it (5.11): a tenth of the cost. */
#ifndef HAVE_COARSE_CLOCK
#define clock_coarse bpf_ktime_get_ns
#endif

/* For the verifier: no native build needs it. */
#ifdef __clang__
#define UNROLL _Pragma("unroll")
#else
#define UNROLL
#endif

#include "verifier.h"

#define EBUSY 16
#define EEXIST 17	/* of BPF_NOEXIST: the map has this key */

/*
 * The value of an ARRAY of one element. The loader puts its address into the bytecode (Linux 5.2), so
 * there is no look-up, and it is never NULL.
 */
#ifndef DIALECT_BCC
#define ONLY_VALUE(type, map) LOOKUP_NUMBER(type, map, 0)
#endif

/* The map's value for a key, as a pointer of its type, or NULL. */
#define LOOKUP(type, map, key) ((type *)bpf_map_lookup_elem(MAP(map), key))

/* The same for a key that is a number; eight bytes are written, of which four are read: see EMPTY. */
#define LOOKUP_NUMBER(type, map, number) ({ \
	__u64 number_ = (__u32)(number); \
	LOOKUP(type, map, &number_); \
})

#endif
