/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Answers for load balancer addresses on the node's segment (docs/load-balancer-addresses.md): an ARP
 * request or neighbour solicitation for an address in the map `answered` becomes its answer, in place.
 * Attached to the uplink at ingress, only with --l2-pool; every other packet goes on unchanged.
 *
 * Answers go to the MAC address of the frame, one for each request: nobody else gets packets by a forged
 * sender. Duplicate address detection, and announcements by others, are not answered: the agent sees
 * them (ebpflb/kernel/segment.py).
 */
#include "compat.h"
#include "layout.h"
#include "maps/answered.h"
#include "net/neighbour.h"
#include "net/response.h"

#define NEXT -1
#define TO_OTHER_HOST 3		/* PACKET_OTHERHOST: a switch has flooded the frame */

/* Reads the answer for an address, if it is given at this device, and now. */
static __always_inline const struct answer *answer_for(const struct __sk_buff *ctx,
						       const struct address *target)
{
	const struct answer *answer = LOOKUP(struct answer, answered, target);

	if (!answer || answer->ifindex != ctx->ifindex)
		return NULL;
	return answer->until && answer->until < bpf_ktime_get_ns() ? NULL : answer;
}

/* Addresses the frame to its sender. Returns false for a sender that is no single station. */
static __always_inline bool link_back(struct __sk_buff *ctx, const struct answer *answer)
{
	EMPTY(struct link_addresses, link);

	if (bpf_skb_load_bytes(ctx, 0, link, sizeof(*link)) || link->source[0] & GROUP_BIT)
		return false;
	__builtin_memcpy(link->destination, link->source, sizeof(link->source));
	__builtin_memcpy(link->source, answer->mac, sizeof(link->source));
	return !bpf_skb_store_bytes(ctx, 0, link, sizeof(*link), 0);
}

static __always_inline __be32 read_v4(const __u8 *from)
{
	__be32 v4;

	__builtin_memcpy(&v4, from, sizeof(v4));
	return v4;
}

static __always_inline bool arp_asks(const struct arp *arp)
{
	return arp->hardware == BE16(1) && arp->protocol == BE16(ETHERTYPE_IPV4) &&
	       arp->sizes[0] == 6 && arp->sizes[1] == 4 && arp->operation == ARP_REQUEST &&
	       read_v4(arp->sender) != read_v4(arp->target);
}

static __always_inline int answer_arp(struct __sk_buff *ctx)
{
	const struct answer *answer;
	struct address target;
	__be32 asked;

	EMPTY(struct arp, arp);
	if (bpf_skb_load_bytes(ctx, LINK, arp, sizeof(*arp)) || !arp_asks(arp))
		return NEXT;
	asked = read_v4(arp->target);
	target = address_from_v4(asked);
	answer = answer_for(ctx, &target);
	if (!answer || !link_back(ctx, answer))
		return NEXT;
	arp->operation = ARP_REPLY;
	__builtin_memcpy(arp->target_mac, arp->sender_mac, sizeof(arp->target_mac));
	__builtin_memcpy(arp->target, arp->sender, sizeof(arp->target));
	__builtin_memcpy(arp->sender_mac, answer->mac, sizeof(arp->sender_mac));
	__builtin_memcpy(arp->sender, &asked, sizeof(asked));
	bpf_skb_store_bytes(ctx, LINK, arp, sizeof(*arp), 0);
	return bpf_redirect(ctx->ifindex, 0);
}

/* The solicitation's payload becomes an advertisement with its checksum. */
static __always_inline void advertise(struct neighbour *neighbour, const struct ipv6 *ip,
				      const struct answer *answer)
{
	EMPTY(struct pseudo_header, pseudo);

	neighbour->type = ADVERTISEMENT;
	neighbour->checksum = 0;
	neighbour->flags = SOLICITED_OVERRIDE;
	neighbour->option = TARGET_MAC;
	neighbour->length = 1;
	__builtin_memcpy(neighbour->mac, answer->mac, sizeof(neighbour->mac));
	pseudo->source = ip->source;
	pseudo->destination = ip->destination;
	pseudo->size = BE32(sizeof(*neighbour));
	pseudo->protocol = BE32(ICMPV6);
	neighbour->checksum = fold(sum_of(neighbour, sizeof(*neighbour),
					  sum_of(pseudo, sizeof(*pseudo), 0)));
}

/* Whether it can be no solicitation: all other packets of IPv6 are to cost little. */
static __always_inline bool is_other_packet(const struct __sk_buff *ctx)
{
	const struct ipv6 *ip = (void *)(long)ctx->data + LINK;

	return (const void *)(ip + 1) <= (const void *)(long)ctx->data_end &&
	       (ip->next != ICMPV6 || ip->hops != NEIGHBOUR_HOPS);
}

static __always_inline int answer_solicitation(struct __sk_buff *ctx)
{
	const __u32 size = LINK + sizeof(struct ipv6) + sizeof(struct neighbour);
	const struct answer *answer;

	EMPTY(struct ipv6, ip);
	EMPTY(struct neighbour, neighbour);
	if (bpf_skb_load_bytes(ctx, LINK, ip, sizeof(*ip)) || ip->next != ICMPV6 ||
	    ip->hops != NEIGHBOUR_HOPS || address_is_any(&ip->source) ||
	    bpf_skb_load_bytes(ctx, LINK + sizeof(*ip), neighbour, SOLICITATION_SIZE) ||
	    neighbour->type != SOLICITATION || neighbour->code)
		return NEXT;
	answer = answer_for(ctx, &neighbour->target);
	if (!answer || !link_back(ctx, answer) || bpf_skb_change_tail(ctx, size, 0))
		return NEXT;
	ip->version_class_label = BE32(0x60000000);
	ip->payload = BE16(sizeof(*neighbour));
	ip->destination = ip->source;
	ip->source = neighbour->target;
	advertise(neighbour, ip, answer);
	bpf_skb_store_bytes(ctx, LINK, ip, sizeof(*ip), 0);
	bpf_skb_store_bytes(ctx, LINK + sizeof(*ip), neighbour, sizeof(*neighbour), 0);
	return bpf_redirect(ctx->ifindex, 0);
}

PROGRAM("tc/ingress")
int answer(struct __sk_buff *ctx)
{
	if (ctx->protocol != BE16(ETHERTYPE_ARP) && ctx->protocol != BE16(ETHERTYPE_IPV6))
		return NEXT;
	if (ctx->protocol == BE16(ETHERTYPE_IPV6) && is_other_packet(ctx))
		return NEXT;
	if (ctx->vlan_present || ctx->pkt_type == TO_OTHER_HOST)
		return NEXT;
	return ctx->protocol == BE16(ETHERTYPE_ARP) ? answer_arp(ctx) : answer_solicitation(ctx);
}

LICENSE("GPL")
