/* SPDX-License-Identifier: GPL-2.0 */
/* The Internet checksum (RFC 1071), and its update after a change of the data (RFC 1624). */
#ifndef EBPFLB_NET_CHECKSUM_H
#define EBPFLB_NET_CHECKSUM_H

#include "compat.h"
#include "layout.h"

static __always_inline __s64 fold32(__u64 sum)
{
	sum = (sum & 0xffffffff) + (sum >> 32);
	return (sum & 0xffffffff) + (sum >> 32);
}

/* Returns the difference to add to a checksum; a call of bpf_csum_diff would cost more. */
static __always_inline __s64 addresses_difference(const struct tuple *from, const struct tuple *to)
{
	const __u32 *old = (const __u32 *)from, *new = (const __u32 *)to;
	__u64 sum = 0;

	UNROLL
	for (int i = 0; i < 8; i++)
		sum += (__u64)new[i] + (__u32)~old[i];
	return fold32(sum);
}

static __always_inline __s64 ports_difference(const struct tuple *from, const struct tuple *to)
{
	__u32 old, new;

	__builtin_memcpy(&old, &from->source_port, 4);
	__builtin_memcpy(&new, &to->source_port, 4);
	return old == new ? 0 : fold32((__u64)new + (__u32)~old);
}

/* Returns the checksum after a change, computed like in bpf_l3_csum_replace. */
static __always_inline __u16 checksum_changed(__u16 checksum, __s64 difference)
{
	__u64 sum = fold32(difference + (__u16)~checksum);

	sum = (sum & 0xffff) + (sum >> 16);
	return ~((sum & 0xffff) + (sum >> 16));
}

#endif
