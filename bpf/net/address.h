/* SPDX-License-Identifier: GPL-2.0 */
/* Addresses and frontends of both families in one form: IPv4 is v4-mapped IPv6. */
#ifndef EBPFLB_NET_ADDRESS_H
#define EBPFLB_NET_ADDRESS_H

#include "compat.h"
#include "layout.h"

#define BE32(number) ((__be32)__builtin_bswap32(number))
#define BE16(number) ((__be16)__builtin_bswap16(number))
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "big-endian machines are not supported"
#endif

static __always_inline struct address address_from_v4(__be32 v4)
{
	return (struct address){ .word = { 0, 0, BE32(0xffff), v4 } };
}

static __always_inline bool address_is_v4(const struct address *address)
{
	return !address->word[0] && !address->word[1] && address->word[2] == BE32(0xffff);
}

static __always_inline bool address_equal(const struct address *a, const struct address *b)
{
	return a->word[0] == b->word[0] && a->word[1] == b->word[1] &&
	       a->word[2] == b->word[2] && a->word[3] == b->word[3];
}

/* Returns the unspecified address of the same family: 0.0.0.0 or :: */
static __always_inline struct address address_any(const struct address *family)
{
	return (struct address){ .word = { 0, 0, address_is_v4(family) ? BE32(0xffff) : 0, 0 } };
}

static __always_inline bool frontend_equal(const struct frontend *a, const struct frontend *b)
{
	return address_equal(&a->address, &b->address) && a->port == b->port &&
	       a->protocol == b->protocol;
}

/* Whether an address is in a prefix: equal under the mask. */
static __always_inline bool prefix_has(const struct prefix *prefix, const struct address *address)
{
	return (address->word[0] & prefix->mask.word[0]) == prefix->address.word[0] &&
	       (address->word[1] & prefix->mask.word[1]) == prefix->address.word[1] &&
	       (address->word[2] & prefix->mask.word[2]) == prefix->address.word[2] &&
	       (address->word[3] & prefix->mask.word[3]) == prefix->address.word[3];
}

/* Returns 127.0.0.1 or ::1, of the same family. */
static __always_inline struct address address_loopback(const struct address *family)
{
	struct address loopback = address_any(family);

	loopback.word[3] = address_is_v4(family) ? BE32(0x7f000001) : BE32(1);
	return loopback;
}

static __always_inline bool address_is_any(const struct address *address)
{
	return !address->word[0] && !address->word[1] && !address->word[3] &&
	       (!address->word[2] || address->word[2] == BE32(0xffff));
}

/* Whether it is in 127.0.0.0/8, ::1, or unspecified, which Linux connects to loopback. */
static __always_inline bool address_is_loopback(const struct address *address)
{
	if (address_is_v4(address))
		return (address->word[3] & BE32(0xff000000)) == BE32(0x7f000000) ||
		       !address->word[3];
	return !address->word[0] && !address->word[1] && !address->word[2] &&
	       (address->word[3] & ~BE32(1)) == 0;
}

#endif
