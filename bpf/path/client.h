/* SPDX-License-Identifier: GPL-2.0 */
/* What can be known of who sent a packet, at the device where it came in, and if he is to be seen. */
#ifndef EBPFLB_PATH_CLIENT_H
#define EBPFLB_PATH_CLIENT_H

#include "net/packet.h"
#include "path/policy.h"

#define FAMILY_V4 2
#define FAMILY_V6 10

/* The detect-local modes (kube-proxy.md 5.2): by prefix or by the device. */
static __always_inline bool asker_is_pod(struct __sk_buff *ctx, const struct settings *settings,
					 const struct address *address)
{
	__u32 ifindex = ctx->ifindex;
	struct device *device;

	if (!(settings->flags & SETTING_DETECT_LOCAL))
		return false;
	if (prefix_has(&settings->pods_v4, address) || prefix_has(&settings->pods_v6, address))
		return true;
	device = LOOKUP(struct device, devices, &ifindex);
	return device && device->flags & DEVICE_PODS;
}

/*
 * Whether a backend's answers to the asker leave by this device: then they pass here too. The stack
 * routes them as the backend's own; rules and paths may go by that.
 */
static __always_inline bool asker_is_symmetric(struct __sk_buff *ctx, const struct packet *packet,
					       const struct backend *backend)
{
	struct bpf_fib_lookup way = { .family = packet->v6 ? FAMILY_V6 : FAMILY_V4,
				      .l4_protocol = packet->tuple.protocol,
				      .sport = backend->port,
				      .dport = packet->tuple.source_port,
				      .ifindex = ctx->ifindex };
	long answer;

	if (packet->v6) {
		__builtin_memcpy(way.ipv6_src, &backend->address, 16);
		__builtin_memcpy(way.ipv6_dst, &packet->tuple.source, 16);
	} else {
		way.ipv4_src = backend->address.word[3];
		way.ipv4_dst = packet->tuple.source.word[3];
	}
	answer = bpf_fib_lookup(ctx, &way, sizeof(way), 0);
	return (answer == BPF_FIB_LKUP_RET_SUCCESS || answer == BPF_FIB_LKUP_RET_NO_NEIGH) &&
	       way.ifindex == ctx->ifindex;
}

/* Whether the backend is to see this node instead; the way back is asked for only where it counts. */
static __always_inline bool asker_is_hidden(struct __sk_buff *ctx, const struct packet *packet,
					    const struct settings *settings,
					    const struct asker *asker,
					    const struct scratch *arrival)
{
	const struct service *service = &arrival->service;

	if (policy_masquerades(settings, service, &arrival->backend, asker))
		return true;
	return service->flags & SERVICE_EXTERNAL && !(service->flags & SERVICE_LOCAL) &&
	       !asker_is_symmetric(ctx, packet, &arrival->backend);
}

#endif
