/* SPDX-License-Identifier: GPL-2.0 */
/*
 * libFuzzer's target for bpf/hooks/packet.c, compiled natively: headers, fragments, extension headers,
 * ICMP errors, and what the programs write into packets and maps. Maps and helpers are played here. A
 * packet's direct part lies before poisoned memory, values and keys of maps are allocated by
 * themselves: AddressSanitizer sees each access beyond them, UndefinedBehaviorSanitizer the rest.
 *
 * An input begins with the node's state (struct state). Then packets follow, each with a head (struct
 * head), with maps and clock in common: so fragments and flows go on.
 */
#include "compat.h"

#include <errno.h>
#include <sanitizer/asan_interface.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

#define BUCKETS 64

enum kind { HASH, LRU_HASH, LPM_TRIE, ARRAY, PERCPU_ARRAY, CPU_ARRAYS, RINGBUF };

struct map {
	const char *name;
	enum kind kind;
	__u32 key_size, value_size, entries;
	struct map *next;
	struct element *buckets[BUCKETS];
};

struct element {
	struct element *next;
	void *key, *value;
	const __u8 *first;	/* of those that fuzz/maps.py has written: the value that it begins with */
};

static struct map *maps;

/* As in maps.h of the other dialects, with a table behind each name. */
#undef DEFINE_MAP
#undef MAP
#define MAP(name) ((void *)&name)
#define DEFINE_MAP(name, kind, key, value, entries, flags) \
	static struct map name = { #name, kind, sizeof(key), sizeof(value), entries, NULL, {} }; \
	enum { ENTRIES_##name = entries }; \
	__attribute__((constructor)) static void register_##name(void) \
	{ \
		name.next = maps; \
		maps = &name; \
	}

#include "hooks/packet.c"

#define LONGEST 2048	/* bytes of a frame: longer than any that a device here takes */
#define MOST 4		/* elements of a bucket that programs fill: the oldest one goes */
#define REQUIRE(condition) do { if (!(condition)) abort(); } while (0)

struct state {
	__u16 flags;		/* of the settings */
	__u8 gate;		/* 1: there are no flows; 2: attempts are noted */
	__u8 pad;
};

struct head {
	__u8 hook;		/* 1: egress; 2: by PODS; 4: came in by UPLINK; 8: GSO; 16: in a VLAN */
	__u8 direct;		/* bytes that can be read directly, in eights */
	__u16 length;
};

enum { UPLINK = 1, PODS = 2 };

static __u8 *entries;		/* what fuzz/maps.py has written */
static size_t entries_size;
static __u64 now;
static __u32 dice;
static __u8 *low;		/* memory whose addresses have 32 bits, as those in an skb's context */
static __u8 *frame;
static __u32 direct;

static bool fits(const struct map *map, const struct element *element, const void *key)
{
	const __u8 *prefix = element->key, *wanted = key;
	__u32 bits;

	if (map->kind != LPM_TRIE)
		return !memcmp(element->key, key, map->key_size);
	memcpy(&bits, prefix, sizeof(bits));
	for (__u32 bit = 0; bit < bits; bit++) {
		__u32 at = 4 + bit / 8, mask = 128 >> bit % 8;

		if ((prefix[at] ^ wanted[at]) & mask)
			return false;
	}
	return true;
}

static struct element **bucket(struct map *map, const void *key)
{
	const __u8 *bytes = key;
	__u32 sum = 0;

	for (__u32 at = 0; at < map->key_size && map->kind != LPM_TRIE; at++)
		sum = sum * 31 + bytes[at];
	return &map->buckets[sum % BUCKETS];
}

static struct element **find(struct map *map, const void *key)
{
	struct element **at = bucket(map, key);

	while (*at && !fits(map, *at, key))
		at = &(*at)->next;
	return at;
}

static void *copied(const void *from, __u32 size)
{
	void *made = calloc(1, size);

	return from ? memcpy(made, from, size) : made;
}

static void remove_at(struct element **at)
{
	struct element *gone = *at;

	*at = gone->next;
	free(gone->key);
	free(gone->value);
	free(gone);
}

static struct element *add(struct map *map, const void *key, const void *value)
{
	struct element *made = calloc(1, sizeof(*made)), **last = bucket(map, key);
	int count = 0;

	made->key = copied(key, map->key_size);
	made->value = copied(value, map->value_size);
	made->next = *last;
	*last = made;
	for (; *last; last = &(*last)->next)
		if (map->kind == LRU_HASH && count++ == MOST) {
			remove_at(last);
			break;
		}
	return made;
}

static bool is_array(const struct map *map)
{
	return map->kind == ARRAY || map->kind == PERCPU_ARRAY || map->kind == CPU_ARRAYS;
}

void *bpf_map_lookup_elem(void *map_, const void *key)
{
	struct map *map = map_;
	struct element *found = *find(map, key);
	__u32 number, parts = map->kind == CPU_ARRAYS ? COUNTER_PARTS : 1;

	if (!found && is_array(map)) {
		memcpy(&number, key, sizeof(number));
		if (number < map->entries * parts)
			found = add(map, key, NULL);
	}
	return found ? found->value : NULL;
}

long bpf_map_update_elem(void *map_, const void *key, const void *value, __u64 flags)
{
	struct map *map = map_;
	struct element **at = find(map, key);

	if (*at && flags == BPF_NOEXIST)
		return -EEXIST;
	if (*at)
		memcpy((*at)->value, value, map->value_size);
	else
		add(map, key, value);
	return 0;
}

long bpf_map_delete_elem(void *map, const void *key)
{
	struct element **at = find(map, key);

	if (!*at)
		return -ENOENT;
	REQUIRE(!(*at)->first);
	remove_at(at);
	return 0;
}

long bpf_ringbuf_output(void *ring, void *data, __u64 size, __u64 flags)
{
	free(copied(data, size));
	return 0;
}

__u64 bpf_ktime_get_ns(void)
{
	return now;
}

__u64 jiffies64(void)
{
	return now / 4000000;
}

__u32 bpf_get_prandom_u32(void)
{
	return dice = dice * 1664525 + 1013904223;
}

__u32 bpf_get_smp_processor_id(void)
{
	return 0;
}

__u64 get_netns_cookie(void *ctx)
{
	return 1;
}

__u64 get_socket_cookie(void *ctx)
{
	return 1;
}

int set_retval(int retval)
{
	return 0;
}

int bpf_sock_ops_cb_flags_set(struct bpf_sock_ops *ctx, int flags)
{
	return 0;
}

/* The frame, its direct part in low memory right before poisoned bytes. */
static void lay(struct __sk_buff *ctx)
{
	__u8 *start = low + LONGEST - direct;

	ASAN_UNPOISON_MEMORY_REGION(low, 2 * LONGEST);
	memcpy(start, frame, direct);
	ASAN_POISON_MEMORY_REGION(low, LONGEST - direct);
	ASAN_POISON_MEMORY_REGION(low + LONGEST, LONGEST);
	ctx->data = (__u32)(unsigned long)start;
	ctx->data_end = ctx->data + direct;
}

long bpf_skb_load_bytes(const void *ctx_, __u32 offset, void *to, __u32 size)
{
	const struct __sk_buff *ctx = ctx_;

	if (offset > ctx->len || size > ctx->len - offset)
		return -EFAULT;
	memcpy(to, frame + offset, size);
	return 0;
}

long bpf_skb_store_bytes(struct __sk_buff *ctx, __u32 offset, const void *from, __u32 size,
			 __u64 flags)
{
	if (offset > ctx->len || size > ctx->len - offset)
		return -EFAULT;
	memcpy(frame + offset, from, size);
	lay(ctx);
	return 0;
}

long bpf_skb_vlan_pop(struct __sk_buff *ctx)
{
	ctx->vlan_present = 0;
	return 0;
}

long bpf_skb_change_tail(struct __sk_buff *ctx, __u32 size, __u64 flags)
{
	if (size > LONGEST || size < 14)
		return -EINVAL;
	frame = realloc(frame, size);
	if (size > ctx->len)
		memset(frame + ctx->len, 0, size - ctx->len);
	ctx->len = size;
	direct = direct < size ? direct : size;
	lay(ctx);
	return 0;
}

static long change_sum(struct __sk_buff *ctx, __u32 at)
{
	__u16 sum;

	return bpf_skb_load_bytes(ctx, at, &sum, 2) ? -EFAULT : bpf_skb_store_bytes(ctx, at, &sum, 2, 0);
}

long bpf_l3_csum_replace(struct __sk_buff *ctx, __u32 at, __u64 from, __u64 to, __u64 flags)
{
	return change_sum(ctx, at);
}

long bpf_l4_csum_replace(struct __sk_buff *ctx, __u32 at, __u64 from, __u64 to, __u64 flags)
{
	return change_sum(ctx, at);
}

__s64 bpf_csum_diff(__be32 *from, __u32 from_size, __be32 *to, __u32 to_size, __u32 seed)
{
	free(copied(from, from_size));
	free(copied(to, to_size));
	return seed;
}

long bpf_fib_lookup(void *ctx, struct bpf_fib_lookup *params, int size, __u32 flags)
{
	__u32 drawn = bpf_get_prandom_u32() >> 16;

	params->ifindex = drawn & 1 ? UPLINK : PODS;
	return drawn & 2 ? BPF_FIB_LKUP_RET_SUCCESS : BPF_FIB_LKUP_RET_NO_NEIGH;
}

long bpf_redirect(__u32 ifindex, __u64 flags)
{
	return 7;
}

long redirect_neigh(__u32 ifindex, void *next, int size, __u64 flags)
{
	return 7;
}

static struct map *map_of(const __u8 *name, __u16 length)
{
	struct map *map = maps;

	while (map && (strlen(map->name) != length || memcmp(map->name, name, length)))
		map = map->next;
	REQUIRE(map);
	return map;
}

static void fill(void)
{
	__u16 sizes[3];

	for (const __u8 *at = entries; at < entries + entries_size; at += sizes[2]) {
		memcpy(sizes, at, sizeof(sizes));
		at += sizeof(sizes) + sizes[0];
		struct map *map = map_of(at - sizes[0], sizes[0]);

		REQUIRE(sizes[1] == map->key_size && sizes[2] == map->value_size);
		at += sizes[1];
		bpf_map_update_elem(map, at - sizes[1], at, 0);
		(*find(map, at - sizes[1]))->first = at;
	}
}

/* What programs have written goes; they delete nothing that the agent has written. */
static void reset(void)
{
	for (struct map *map = maps; map; map = map->next)
		for (int number = 0; number < BUCKETS; number++)
			for (struct element **at = &map->buckets[number]; *at;) {
				if (!(*at)->first) {
					remove_at(at);
					continue;
				}
				memcpy((*at)->value, (*at)->first, map->value_size);
				at = &(*at)->next;
			}
}

int LLVMFuzzerInitialize(int *count, char ***words)
{
	const char *name = getenv("EBPFLB_FUZZ_MAPS");
	FILE *file = fopen(name ? name : "maps.bin", "rb");

	REQUIRE(file);
	entries = malloc(1 << 20);
	entries_size = fread(entries, 1, 1 << 20, file);
	fclose(file);
	low = mmap(NULL, 2 * LONGEST, PROT_READ | PROT_WRITE,
		   MAP_PRIVATE | MAP_ANONYMOUS | MAP_32BIT, -1, 0);
	REQUIRE(low != MAP_FAILED);
	fill();
	return 0;
}

static __u64 malformed(void)
{
	return *LOOKUP_NUMBER(__u64, verdicts, VERDICT_MALFORMED);
}

/* A frame that is cut short or contradicts itself is left as it is. */
static void run(const struct head *head, const __u8 *data)
{
	struct __sk_buff ctx = {
		.len = head->length, .ifindex = head->hook & 2 ? PODS : UPLINK,
		.ingress_ifindex = head->hook & 4 ? UPLINK : 0,
		.gso_size = head->hook & 8 ? 100 : 0, .gso_segs = head->hook & 8 ? 3 : 0,
		.vlan_present = head->hook & 16 ? 1 : 0,
	};
	__u64 before = malformed();
	int action;

	frame = copied(data, head->length);
	direct = head->direct * 8 < head->length ? head->direct * 8 : head->length;
	memcpy(&ctx.protocol, frame + 12, 2);
	ctx.protocol &= 0xffff;
	lay(&ctx);
	now += SECOND / 10;
	action = head->hook & 1 ? egress(&ctx) : ingress(&ctx);
	REQUIRE(action == GO_ON || action == 0 || action == 2 || action == 7);
	if (malformed() > before)
		REQUIRE(ctx.len == head->length && !memcmp(frame, data, ctx.len));
	free(frame);
}

int LLVMFuzzerTestOneInput(const __u8 *data, size_t size)
{
	struct state state;
	struct head head;

	if (size < sizeof(state))
		return 0;
	memcpy(&state, data, sizeof(state));
	now = 1000 * SECOND;
	dice = 7;
	reset();
	settings_read()->flags = state.flags;
	ONLY_VALUE(struct flow_gate, flow_gate)->empty = state.gate & 1;
	ONLY_VALUE(struct flow_gate, flow_gate)->endpoint_health = state.gate >> 1 & 1;
	for (size_t at = sizeof(state); size - at > sizeof(head); at += head.length) {
		memcpy(&head, data + at, sizeof(head));
		at += sizeof(head);
		if (head.length > LONGEST)
			head.length = LONGEST;
		if (head.length > size - at)
			head.length = size - at;
		if (head.length < 34)	/* the kernel makes no skb of less than an IPv4 header here */
			break;
		run(&head, data + at);
	}
	return 0;
}
