/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A request to a frontend, and what is known of its client. Sockets and packets know different
 * things, and some need a look-up, which is made only when the result is needed. Whether requests
 * come from sockets or packets is a constant in each program.
 */
#ifndef EBPFLB_CORE_CLIENT_H
#define EBPFLB_CORE_CLIENT_H

#include "core/settings.h"
#include "core/tuple.h"

#define FAMILY_V4 2
#define FAMILY_V6 10

struct request {
	const struct frontend *frontend;
	/* of a socket: cookies; its address is unknown until its packets leave */
	__u64 socket;
	__u64 netns;
	__u32 is_connected;	/* a boolean: it is connected, or about to be */
	__u64 begun;		/* when the hook began, for its event (record/event_call.h) */
	/* of a packet; NULL at sockets */
	struct __sk_buff *packet;
	const struct tuple *tuple;
	const struct settings *settings;
	__u32 ifindex;		/* where it comes in */
	bool is_translated;	/* by its socket: no external frontend counts */
	bool in_middle;		/* a segment of a connection that conntrack may not know any more */
};

/*
 * kube-proxy's detect-local (kube-proxy.md 5.2), by prefix or by device: whether the client is local
 * to the cluster, as pods are. The node's own sockets count too.
 */
static __always_inline bool client_is_local(const struct request *request)
{
	const struct settings *settings = request->settings;
	__u32 ifindex = request->ifindex;
	struct device *device;

	if (!request->tuple)
		return true;
	if (!(settings->flags & SETTING_DETECT_LOCAL))
		return false;
	if (prefix_has(&settings->pods_v4, &request->tuple->source) ||
	    prefix_has(&settings->pods_v6, &request->tuple->source))
		return true;
	device = LOOKUP_NUMBER(struct device, devices, ifindex);
	return device && device->flags & DEVICE_PODS;
}

/*
 * The client's address, for source ranges. A socket of the node's own namespace has the node's
 * address; that of a pod's socket is unknown here: NULL.
 */
static __always_inline const struct address *client_address(const struct request *request)
{
	struct settings *settings;

	if (request->tuple)
		return &request->tuple->source;
	settings = settings_read();
	if (!netns_is_host(request->netns))
		return NULL;
	return address_is_v4(&request->frontend->address) ? &settings->node_v4
							  : &settings->node_v6;
}

/*
 * Whether packets from one address and port to another leave by the device where this packet comes in.
 * Routing rules may match ports and protocols, so the look-up includes them.
 */
static __always_inline bool route_is_by_device(struct __sk_buff *ctx, const struct packet *packet,
					       const struct address *from, __be16 from_port,
					       const struct address *to, __be16 to_port)
{
	struct bpf_fib_lookup route = { .family = packet->v6 ? FAMILY_V6 : FAMILY_V4,
					.l4_protocol = packet->tuple.protocol,
					.sport = from_port,
					.dport = to_port,
					.ifindex = ctx->ifindex };
	long result;

	if (packet->v6) {
		__builtin_memcpy(route.ipv6_src, from, 16);
		__builtin_memcpy(route.ipv6_dst, to, 16);
	} else {
		route.ipv4_src = from->word[3];
		route.ipv4_dst = to->word[3];
	}
	result = bpf_fib_lookup(ctx, &route, sizeof(route), 0);
	return (result == BPF_FIB_LKUP_RET_SUCCESS || result == BPF_FIB_LKUP_RET_NO_NEIGH) &&
	       route.ifindex == ctx->ifindex;
}

/*
 * Whether a backend's replies to the client leave by the device where the client's packets come in:
 * then they pass our hooks there.
 */
static __always_inline bool client_is_symmetric(struct __sk_buff *ctx, const struct packet *packet,
						const struct backend *backend)
{
	return route_is_by_device(ctx, packet, &backend->address, backend->port,
				  &packet->tuple.source, packet->tuple.source_port);
}

#endif
