/* SPDX-License-Identifier: GPL-2.0 */
/* Source ports for masqueraded flows, and for flows whose client's port is in use. */
#ifndef EBPFLB_ENGINE_FLOWS_SOURCE_PORT_H
#define EBPFLB_ENGINE_FLOWS_SOURCE_PORT_H

#include "net/address.h"

#define PORT_TRIES 16	/* how many random ports are tried for a flow */

static __always_inline __be16 source_port_random(const struct settings *settings)
{
	__u32 ports = settings->last_port - settings->first_port + 1;
	__u32 index = ((__u64)bpf_get_prandom_u32() * ports) >> 32;

	return BE16((__u16)(settings->first_port + index));
}

#endif
