/* SPDX-License-Identifier: GPL-2.0 */
/*
 * ICMP and ICMPv6 errors (RFC 792, RFC 4443 2.1) quote the head of a packet that could not be
 * delivered. The sender recognizes the packet by it, so the quoted packet is translated too.
 */
#ifndef EBPFLB_NET_ICMP_ERROR_H
#define EBPFLB_NET_ICMP_ERROR_H

#include "net/rewrite.h"

#define ECHO 8
#define ECHO_V6 128
#define REDIRECT 5
#define REDIRECT_V6 137
#define LINK_ADDRESS_OPTION 2	/* RFC 4861 4.6 */
#define REDIRECTED_OPTION 4

/* Unreachable, time exceeded, parameter problem; "packet too big" is a kind of unreachable. */
static __always_inline bool error_is(const struct packet *packet, __u8 type)
{
	if (packet->v6)
		return type >= 1 && type <= 4;
	return type == 3 || type == 11 || type == 12;
}

/* Whether the packet is an echo request, whole or the first fragment of one. */
static __always_inline bool packet_is_echo(struct __sk_buff *ctx, const struct packet *packet)
{
	struct icmp icmp;

	return packet->tuple.protocol == (packet->v6 ? ICMPV6 : ICMP) && packet->piece != LATER &&
	       !bpf_skb_load_bytes(ctx, packet->transport, &icmp, sizeof(icmp)) &&
	       icmp.type == (packet->v6 ? ECHO_V6 : ECHO);
}

static __always_inline bool quote_read_v4(struct __sk_buff *ctx, struct quote *quote)
{
	struct ipv4 ip;

	if (bpf_skb_load_bytes(ctx, quote->ip, &ip, sizeof(ip)))
		return false;
	if (ip.version_length >> 4 != 4 || (ip.version_length & 15) < 5 ||
	    ip.fragment & IPV4_OFFSET)
		return false;
	quote->tuple.source = address_from_v4(ip.source);
	quote->tuple.destination = address_from_v4(ip.destination);
	quote->tuple.protocol = ip.protocol;
	quote->transport = quote->ip + (ip.version_length & 15) * 4;
	return true;
}

/*
 * Skips the quoted fragment header: a router that cannot forward a first fragment quotes that. Returns
 * false for a later one, which has no ports.
 */
static __always_inline bool quote_skip_fragment(struct __sk_buff *ctx, struct quote *quote)
{
	struct ipv6_extension extension;

	if (bpf_skb_load_bytes(ctx, quote->transport, &extension, sizeof(extension)))
		return false;
	quote->tuple.protocol = extension.next;
	quote->transport += sizeof(extension);
	return !(extension.fragment & IPV6_OFFSET);
}

static __always_inline bool quote_read_v6(struct __sk_buff *ctx, struct quote *quote)
{
	struct ipv6 ip;

	if (bpf_skb_load_bytes(ctx, quote->ip, &ip, sizeof(ip)))
		return false;
	quote->tuple.source = ip.source;
	quote->tuple.destination = ip.destination;
	quote->tuple.protocol = ip.next;
	quote->transport = quote->ip + sizeof(ip);
	if ((ip.version_class_label & BE32(0xf0000000)) != BE32(0x60000000))
		return false;
	return ip.next != FRAGMENT || quote_skip_fragment(ctx, quote);
}

/* Reads the quoted packet, which begins at quote->ip. Returns false if it has no ports. */
static __always_inline bool quote_read_at(struct __sk_buff *ctx, const struct packet *packet,
					  struct quote *quote)
{
	if (packet->v6 ? !quote_read_v6(ctx, quote) : !quote_read_v4(ctx, quote))
		return false;
	__u8 protocol = quote->tuple.protocol;

	if (protocol != TCP && protocol != UDP && protocol != SCTP)
		return false;
	return quote->transport + 8 <= packet->end &&
	       !bpf_skb_load_bytes(ctx, quote->transport, &quote->tuple.source_port, 4);
}

static __always_inline bool icmp_read(struct __sk_buff *ctx, const struct packet *packet,
				      struct icmp *icmp)
{
	return packet->tuple.protocol == (packet->v6 ? ICMPV6 : ICMP) && packet->piece == WHOLE &&
	       !bpf_skb_load_bytes(ctx, packet->transport, icmp, sizeof(*icmp));
}

/* Whether the packet is an error that quotes a packet with ports. */
static __always_inline bool quote_read(struct __sk_buff *ctx, const struct packet *packet,
				       struct quote *quote)
{
	struct icmp icmp;

	if (!icmp_read(ctx, packet, &icmp) || !error_is(packet, icmp.type))
		return false;
	quote->ip = packet->transport + sizeof(icmp);
	return quote_read_at(ctx, packet, quote);
}

/* Sets quote->ip to the packet that an IPv6 redirect quotes, in the first or second option. */
static __always_inline bool redirected_find_v6(struct __sk_buff *ctx, struct quote *quote)
{
	__u8 option = 0;

	quote->ip += 2 * sizeof(struct address);	/* the next hop, and for which destination */
	if (bpf_skb_load_bytes(ctx, quote->ip, &option, sizeof(option)))
		return false;
	if (option == LINK_ADDRESS_OPTION) {
		quote->ip += 8;
		if (bpf_skb_load_bytes(ctx, quote->ip, &option, sizeof(option)))
			return false;
	}
	quote->ip += 8;
	return option == REDIRECTED_OPTION;
}

/* Whether the packet is a redirect that quotes a packet with ports. */
static __always_inline bool redirected_read(struct __sk_buff *ctx, const struct packet *packet,
					    struct quote *quote)
{
	struct icmp icmp;

	if (!icmp_read(ctx, packet, &icmp) || icmp.type != (packet->v6 ? REDIRECT_V6 : REDIRECT))
		return false;
	quote->ip = packet->transport + sizeof(icmp);
	return (!packet->v6 || redirected_find_v6(ctx, quote)) && quote_read_at(ctx, packet, quote);
}

/*
 * Rewrites the error's own addresses and the quoted packet. The checksum of ICMPv6 covers the
 * pseudo header and all that is quoted. ICMP has no pseudo header, and the sum of a quoted IPv4
 * header stays the same. Quoted transport checksums stay as they are: their receiver cannot verify
 * them (RFC 5508 4).
 */
static __always_inline void error_rewrite(struct __sk_buff *ctx, const struct packet *packet,
					  const struct tuple *to, const struct quote *quote,
					  const struct tuple *quoted)
{
	__u32 at = packet->transport + ICMP_CHECKSUM;
	__s64 outer = addresses_difference(&packet->tuple, to);
	__s64 inner = addresses_difference(&quote->tuple, quoted);
	__s64 ports = ports_difference(&quote->tuple, quoted);

	write_addresses(ctx, LINK, packet->v6, to, outer, BPF_F_RECOMPUTE_CSUM);
	write_addresses(ctx, quote->ip, packet->v6, quoted, inner, 0);
	bpf_skb_store_bytes(ctx, quote->transport, &quoted->source_port, 4, 0);
	if (packet->v6) {
		bpf_l4_csum_replace(ctx, at, 0, outer, BPF_F_PSEUDO_HDR);
		bpf_l4_csum_replace(ctx, at, 0, inner, 0);
	}
	if (ports)
		bpf_l4_csum_replace(ctx, at, 0, ports, 0);
}

#endif
