/* SPDX-License-Identifier: GPL-2.0 */
/*
 * SCTP's checksum (CRC32c, RFC 9260 appendix A) after a change of the ports, without reading the
 * packet: the CRC is linear, so it changes by the CRC of the difference, which is four bytes
 * followed by zeros only. A run of 2^n zero bytes multiplies by a constant of the polynomial.
 */
#ifndef EBPFLB_NET_CRC_H
#define EBPFLB_NET_CRC_H

#include "compat.h"

#define CRC32C 0x82f63b78	/* all polynomials are bit-reversed: the highest bit is x^0 */

/* OPAQUE hides the bit from the compiler, which would turn it into a branch or a mask. */
static __always_inline __u32 crc_bit(__u32 word, int bit)
{
	__u32 set = word >> bit & 1;

	OPAQUE(set);
	return set;
}

/*
 * Returns a * b modulo the polynomial. b is a constant, so the compiler computes most of this.
 * OPAQUE hides the bit from the compiler, which would turn it into a mask whose two values the
 * verifier follows separately.
 */
static __always_inline __u32 crc_multiply(__u32 a, __u32 b)
{
	__u32 product = 0;

	UNROLL
	for (int bit = 31; bit >= 0; bit--) {
		product ^= crc_bit(a, bit) * b;
		b = b >> 1 ^ (b & 1 ? CRC32C : 0);
	}
	return product;
}

/* Has no branch: the verifier would follow both ways at each of the sixteen. */
#define CRC_ZEROS(log2, power) \
	delta ^= (delta ^ crc_multiply(delta, power)) * crc_bit(bytes, log2);

/* Returns the change of a packet's checksum. Its first four bytes change by delta. */
static __always_inline __u32 crc_change(__u32 delta, __u32 bytes)
{
	CRC_ZEROS(0, 0x00800000)
	CRC_ZEROS(1, 0x00008000)
	CRC_ZEROS(2, 0x82f63b78)
	CRC_ZEROS(3, 0x6ea2d55c)
	CRC_ZEROS(4, 0x18b8ea18)
	CRC_ZEROS(5, 0x510ac59a)
	CRC_ZEROS(6, 0xb82be955)
	CRC_ZEROS(7, 0xb8fdb1e7)
	CRC_ZEROS(8, 0x88e56f72)
	CRC_ZEROS(9, 0x74c360a4)
	CRC_ZEROS(10, 0xe4172b16)
	CRC_ZEROS(11, 0x0d65762a)
	CRC_ZEROS(12, 0x35d73a62)
	CRC_ZEROS(13, 0x28461564)
	CRC_ZEROS(14, 0xbf455269)
	CRC_ZEROS(15, 0xe2ea32dc)
	return delta;
}

#endif
