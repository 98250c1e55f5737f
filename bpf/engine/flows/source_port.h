/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Which source ports a flow may get that is masqueraded, or whose client's port is in use. As with
 * the kernel's NAT a privileged port stays privileged (nf_nat_l4proto_unique_tuple in
 * net/netfilter/nf_nat_core.c); ports from 1024 on are exchanged for those of the settings.
 */
#ifndef EBPFLB_ENGINE_FLOWS_SOURCE_PORT_H
#define EBPFLB_ENGINE_FLOWS_SOURCE_PORT_H

#include "net/packet.h"

#define PRIVILEGED 1024	/* ports below it are only for processes of root */

struct source_ports {
	__u32 first;
	__u32 last;
};

static __always_inline struct source_ports source_ports_for(const struct settings *settings,
							    __be16 client_port)
{
	__u32 port = host16(client_port);

	if (port < 512)
		return (struct source_ports){ 1, 511 };
	if (port < PRIVILEGED)
		return (struct source_ports){ 600, 1023 };
	return (struct source_ports){ settings->first_port, settings->last_port };
}

/* At random, as with --random-fully, by which kube-proxy masquerades (kube-proxy.md 5). */
static __always_inline __be16 source_port_random(struct source_ports ports)
{
	__u32 size = ports.last - ports.first + 1;
	__u32 index = ((__u64)bpf_get_prandom_u32() * size) >> 32;

	return BE16((__u16)(ports.first + index));
}

#endif
