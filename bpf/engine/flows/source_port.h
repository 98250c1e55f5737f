/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The source ports that a flow may get if it is masqueraded, or if its client's port is in use.
 * Like in the kernel's NAT, a privileged port stays privileged (nf_nat_l4proto_unique_tuple in
 * net/netfilter/nf_nat_core.c). Ports from 1024 on are replaced by ports of the settings.
 */
#ifndef EBPFLB_ENGINE_FLOWS_SOURCE_PORT_H
#define EBPFLB_ENGINE_FLOWS_SOURCE_PORT_H

#include "core/check.h"
#include "net/packet.h"

#define PRIVILEGED 1024	/* ports below it are only for root's processes */
#define PORTS_WORD (__builtin_offsetof(struct tuple, source_port) / 4)

#define PORT_TRIES 16	/* the number of ports to try for a flow */

static __always_inline __u32 random_below(__u32 limit)
{
	return ((__u64)bpf_get_prandom_u32() * limit) >> 32;
}

/*
 * Returns the ports to try for one flow: they start at a random port and advance in steps of one
 * random size, so no port is tried twice before all have been tried. Like with --random-fully, by
 * which kube-proxy masquerades (kube-proxy.md 5), the ports cannot be predicted.
 */
static __always_inline struct port_sequence port_sequence_between(__u32 first, __u32 last)
{
	__u32 size = last - first + 1;

	return (struct port_sequence){ .first = first,
				   .size = size,
				   .next = random_below(size),
				   .step = 1 + random_below(size / PORT_TRIES) };
}

static __always_inline struct port_sequence port_sequence_for(const struct settings *settings,
						      __be16 client_port)
{
	__u32 port = host16(client_port);

	if (port < 512)
		return port_sequence_between(1, 511);
	if (port < PRIVILEGED)
		return port_sequence_between(600, 1023);
	return port_sequence_between(settings->first_port, settings->last_port);
}

static __always_inline __be16 port_at(const struct port_sequence *ports)
{
	return BE16((__u16)(ports->first + ports->next));
}

static __always_inline __be16 port_next(struct port_sequence *ports)
{
	__be16 port = port_at(ports);

	ports->next = (ports->next + ports->step) % ports->size;
	return port;
}

/* Returns the part of an entry's check that comes from the ports. */
static __always_inline __u64 ports_sum(const struct tuple *tuple)
{
	return check_sum((const word *)tuple + PORTS_WORD, 4, PORTS_WORD);
}

static __always_inline __u64 sum_without_ports(const struct tuple *tuple, const struct flow *flow)
{
	return CHECK_SUM(tuple, flow) - ports_sum(tuple);
}

/*
 * Gives a tuple another destination port, and its entry the matching check. `sum` is the entry's
 * sum without ports, computed only once, since the verifier follows every try of a port.
 */
static __always_inline void flow_name_port(struct tuple *tuple, struct flow *flow, __u64 sum,
					   __be16 port)
{
	tuple->destination_port = port;
	flow->check = check_of(sum + ports_sum(tuple));
}

#endif
