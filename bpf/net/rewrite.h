/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Gives a packet another tuple: addresses, ports, and every checksum that covers them. Checksums
 * are changed by the difference, so a damaged packet still has a wrong checksum.
 *
 * Addresses are in the pseudo header, ports are not: if the device will fill in the checksum
 * (CHECKSUM_PARTIAL), only the pseudo header has been summed up. If a device has summed up the
 * whole packet (CHECKSUM_COMPLETE), the kernel must correct its sum for every change that is not
 * balanced by a checksum in the packet (RECOMPUTE): IPv6 addresses, SCTP, and UDP without a
 * checksum.
 */
#ifndef EBPFLB_NET_REWRITE_H
#define EBPFLB_NET_REWRITE_H

#include "compat.h"
#include "layout.h"
#include "net/packet.h"

/* The Internet checksum (RFC 1071), and its update after a change of the data (RFC 1624). */

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

/*
 * SCTP's checksum (CRC32c, RFC 9260 appendix A) after a change of the ports, without reading the
 * packet: the CRC is linear, so it changes by the CRC of the difference, which is four bytes
 * followed by zeros only. A run of 2^n zero bytes multiplies by a constant of the polynomial.
 */

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

/* Writes the addresses of the IP header at this offset. The mapped prefixes cancel out. */
static __always_inline void write_addresses(struct __sk_buff *ctx, __u32 at, bool v6,
					    const struct tuple *to, __s64 difference, __u64 flags)
{
	if (v6) {
		bpf_skb_store_bytes(ctx, at + IPV6_ADDRESSES, &to->source, 32, flags);
		return;
	}
	__be32 pair[2] = { to->source.word[3], to->destination.word[3] };

	bpf_l3_csum_replace(ctx, at + IPV4_CHECKSUM, 0, difference, 0);
	bpf_skb_store_bytes(ctx, at + IPV4_ADDRESSES, pair, sizeof(pair), 0);
}

static __always_inline void write_checksum(struct __sk_buff *ctx, __u32 at, __s64 addresses,
					   __s64 ports, __u64 flags)
{
	bpf_l4_csum_replace(ctx, at, 0, addresses, flags | BPF_F_PSEUDO_HDR);
	if (ports)
		bpf_l4_csum_replace(ctx, at, 0, ports, flags);
}

/* If the checksum is zero, the device will fill it in after this change. */
static __always_inline void write_crc(struct __sk_buff *ctx, const struct packet *packet,
				      const struct tuple *to)
{
	__u32 at = packet->transport + SCTP_CHECKSUM;
	__u32 from_ports, to_ports;
	EMPTY(__u32, crc);

	__builtin_memcpy(&from_ports, &packet->tuple.source_port, 4);
	__builtin_memcpy(&to_ports, &to->source_port, 4);
	if (from_ports == to_ports || bpf_skb_load_bytes(ctx, at, crc, sizeof(*crc)) || !*crc)
		return;
	/* Ports and checksum are both read as little-endian words, like CRC32c expects. */
	*crc ^= crc_change(from_ports ^ to_ports, packet->end - packet->transport);
	bpf_skb_store_bytes(ctx, at, crc, sizeof(*crc), BPF_F_RECOMPUTE_CSUM);
}

/* Whether the transport header has an Internet checksum (RFC 1071); UDP's may be left out. */
static __always_inline bool packet_is_summed(const struct packet *packet)
{
	return packet->tuple.protocol == TCP ||
	       (packet->tuple.protocol == UDP && packet->second & BE32(0xffff));
}

static __always_inline void write_transport(struct __sk_buff *ctx, const struct packet *packet,
					    const struct tuple *to, __s64 addresses)
{
	bool tcp = packet->tuple.protocol == TCP;
	__u32 at = packet->transport + (tcp ? TCP_CHECKSUM : UDP_CHECKSUM);
	__u64 ports_flags = BPF_F_RECOMPUTE_CSUM;

	if (packet_is_summed(packet)) {
		write_checksum(ctx, at, addresses, ports_difference(&packet->tuple, to),
			       tcp ? 0 : BPF_F_MARK_MANGLED_0);
		ports_flags = 0;
	}
	bpf_skb_store_bytes(ctx, packet->transport, &to->source_port, 4, ports_flags);
	if (packet->tuple.protocol == SCTP)
		write_crc(ctx, packet, to);
}

#ifndef WHOLE_WAY

/* Checksum, addresses and ports of an IPv4 header without options and of what follows it. */
struct ipv4_rest {
	__u16 pad;
	__u16 checksum;
	__be32 source;
	__be32 destination;
	__be32 ports;
};
SIZE(struct ipv4_rest, 16);

#define IPV4_REST (sizeof(struct ipv4_rest) - __builtin_offsetof(struct ipv4_rest, checksum))

/*
 * Handles most packets: the fields to change lie in one piece of the frame, so one call writes
 * them. Returns false if they do not. The sum of the whole packet stays the same: the two checksums
 * balance the other changes.
 */
static __always_inline bool write_in_one(struct __sk_buff *ctx, const struct packet *packet,
					 const struct tuple *to, __s64 addresses)
{
	bool tcp = packet->tuple.protocol == TCP;
	EMPTY(struct ipv4_rest, rest);
	EMPTY(__u16, checksum);

	if (packet->v6 || packet->options || packet->piece == LATER || !packet_is_summed(packet) ||
	    !HEADER_READ(ctx, LINK + IPV4_CHECKSUM, checksum))
		return false;
	rest->source = to->source.word[3];
	rest->destination = to->destination.word[3];
	rest->checksum = checksum_changed(*checksum, addresses);
	__builtin_memcpy(&rest->ports, &to->source_port, sizeof(rest->ports));
	write_checksum(ctx, LINK + sizeof(struct ipv4) + (tcp ? TCP_CHECKSUM : UDP_CHECKSUM),
		       addresses, ports_difference(&packet->tuple, to), tcp ? 0 : BPF_F_MARK_MANGLED_0);
	bpf_skb_store_bytes(ctx, LINK + IPV4_CHECKSUM, &rest->checksum, IPV4_REST, 0);
	return true;
}

#else
#define write_in_one(...) false
#endif

/* Later fragments have no transport header: the checksum in the first one covers them. */
static __always_inline void packet_rewrite(struct __sk_buff *ctx, const struct packet *packet,
					   const struct tuple *to)
{
	__s64 addresses = addresses_difference(&packet->tuple, to);

	if (write_in_one(ctx, packet, to, addresses))
		return;
	write_addresses(ctx, LINK, packet->v6, to, addresses, BPF_F_RECOMPUTE_CSUM);
	if (packet->piece != LATER)
		write_transport(ctx, packet, to, addresses);
}

#endif
