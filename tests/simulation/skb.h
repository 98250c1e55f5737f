/* SPDX-License-Identifier: GPL-2.0 */
/* A packet's bytes, and the kernel's helpers for them; every route leads to one device. */
#include <arpa/inet.h>

enum { MOST_BYTES = 256, REDIRECTED = 7, DEVICE = 1, OTHERS = 9 };
enum { SYN = TCP_SYN, ACK = TCP_ACK, FIN = TCP_FIN | TCP_ACK, RESET = TCP_RST };

static unsigned char bytes[MOST_BYTES];
static struct __sk_buff skb;
__u32 node_address;	/* what routes choose as the source of a masqueraded flow */

/* An address by its last 32 bits: fd00::a.b.c.d, or IPv4 as v4-mapped. */
static struct address address_of(int v6, __u32 last)
{
	if (v6)
		return (struct address){ .word = { BE32(0xfd000000), 0, 0, last } };
	return address_from_v4(last);
}

static int address_is_plain(const struct address *address, int v6)
{
	struct address plain = address_of(v6, address->word[3]);

	return address_equal(address, &plain);
}

static long long place_of_outcome(int v6, int strange, __u32 address, __u32 port)
{
	return (long long)strange << 49 | (long long)!!v6 << 48 | (long long)address << 16 | port;
}

static void verdicts_keep(__u64 *before)
{
	struct map *verdicts = find_map("verdicts");

	memcpy(before, verdicts->values, verdicts->entries * sizeof(__u64));
}

static __u32 verdicts_since(const __u64 *before)
{
	struct map *verdicts = find_map("verdicts");
	__u32 found = 0;

	for (int i = 0; i < verdicts->entries; i++)
		if (((__u64 *)verdicts->values)[i] != before[i])
			found |= 1u << i;
	return found & ~(1u << VERDICT_RETRIED);
}

static long long verdict_outcome(__u32 verdicts)
{
	for (int verdict = VERDICT_REFUSED; verdict < VERDICTS; verdict++)
		if (verdicts & 1u << verdict)
			return -1 - verdict;
	return -1;
}

long bpf_skb_load_bytes(const void *ctx, __u32 offset, void *to, __u32 size)
{
	if (offset > skb.len || size > skb.len - offset)
		return -EFAULT;
	memcpy(to, bytes + offset, size);
	return 0;
}

long bpf_skb_store_bytes(struct __sk_buff *ctx, __u32 offset, const void *from, __u32 size,
			 __u64 flags)
{
	if (offset > skb.len || size > skb.len - offset)
		return -EFAULT;
	memcpy(bytes + offset, from, size);
	return 0;
}

long bpf_skb_change_tail(struct __sk_buff *ctx, __u32 size, __u64 flags)
{
	if (size > MOST_BYTES)
		return -EINVAL;
	skb.len = size;
	return 0;
}

long bpf_skb_vlan_pop(struct __sk_buff *ctx)
{
	return 0;
}

/* tests/packet has the checksums, by the kernel's own helpers. */
long bpf_l3_csum_replace(struct __sk_buff *ctx, __u32 at, __u64 from, __u64 to, __u64 flags)
{
	return 0;
}

long bpf_l4_csum_replace(struct __sk_buff *ctx, __u32 at, __u64 from, __u64 to, __u64 flags)
{
	return 0;
}

__s64 bpf_csum_diff(__be32 *from, __u32 from_size, __be32 *to, __u32 to_size, __u32 seed)
{
	return seed;
}

long bpf_fib_lookup(void *ctx, struct bpf_fib_lookup *route, int size, __u32 flags)
{
	struct address source = address_of(route->family == FAMILY_V6, node_address);

	route->ifindex = DEVICE;
	if (flags & FIB_SOURCE && route->family == FAMILY_V6)
		memcpy(route->ipv6_src, &source, sizeof(source));
	else if (flags & FIB_SOURCE)
		route->ipv4_src = node_address;
	return BPF_FIB_LKUP_RET_SUCCESS;
}

long bpf_redirect(__u32 ifindex, __u64 flags)
{
	return REDIRECTED;
}

long redirect_neigh(__u32 ifindex, void *next, int size, __u64 flags)
{
	return REDIRECTED;
}

