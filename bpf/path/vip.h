/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What is sent to a service's address, and to no port of a service, at ingress. On request such an address
 * behaves like a host's (docs/vips.md):
 *
 *   a ping             --answer-pings: answered, if the service has endpoints for this client
 *   an unknown port    of a load balancer's address: refused or dropped, as the operator says, and
 *                      never led back to the router, which would send the packet here again
 *
 * Addresses of this node itself are left to its kernel.
 */
#ifndef EBPFLB_PATH_VIP_H
#define EBPFLB_PATH_VIP_H

#include "net/icmp_error.h"
#include "rules/frontend.h"
#include "rules/selected.h"

#define SETTING_VIPS (SETTING_ANSWER_PINGS | SETTING_UNKNOWN_PORTS)

/* The service that stands for the address as a whole. */
static __always_inline bool vip_read(const struct address *address, struct service *service)
{
	struct frontend whole = whole_of(address);
	struct service *found;

	if (no_frontend_at(frontend_bit(&whole)))
		return false;
	found = LOOKUP(struct service, services, &whole);
	return found && COPY_CHECKED(service, &whole, found) &&
	       !(service->flags & SERVICE_UNTRACKED) && !LOOKUP(__u32, own_addresses, address);
}

/*
 * A pod's packets go on if they leave by another device: the address may be another node's, where the
 * kernel serves that port.
 */
static __always_inline enum verdict vip_refuse(const struct request *request,
					       const struct packet *packet)
{
	__u32 flags = request->settings->flags;
	const struct tuple *tuple = &packet->tuple;
	bool leads_back = route_is_by_device(request->packet, packet, &tuple->source,
					     tuple->source_port, &tuple->destination,
					     tuple->destination_port);

	record(STEP_UNKNOWN_PORT, leads_back);
	if (!leads_back && client_is_local(request))
		return VERDICT_PASSED;
	if (flags & SETTING_UNKNOWN_REJECT)
		return VERDICT_REFUSED;
	return leads_back || flags & SETTING_UNKNOWN_DROP ? VERDICT_UNKNOWN_PORT : VERDICT_PASSED;
}

/* A packet that opens a connection, or a datagram, for which no frontend matches. */
static __always_inline enum verdict vip_unknown_port(const struct request *request,
						     const struct packet *packet,
						     struct service *service)
{
	if (request->is_translated ||
	    !address_may_be_vip(request->settings, &packet->tuple.destination) ||
	    !vip_read(&packet->tuple.destination, service) ||
	    !(service->flags & SERVICE_LOAD_BALANCER))
		return VERDICT_PASSED;
	return vip_refuse(request, packet);
}

static __always_inline enum verdict vip_ping(const struct request *request,
					     const struct packet *packet,
					     const struct service *service)
{
	bool local_only = policy_is_local_only(service, client_is_local(request));
	__u32 flags = request->settings->flags;

	if (!policy_admits(service, &packet->tuple.source))
		return VERDICT_SOURCE_DENIED;
	if (flags & SETTING_ANSWER_PINGS && (local_only ? service->local : service->cluster).size)
		return VERDICT_PING_ANSWERED;
	if (service->flags & SERVICE_PASSTHROUGH)
		return VERDICT_PASSED_THROUGH;
	if (!(service->flags & SERVICE_EXTERNAL))
		return VERDICT_REFUSED;
	return flags & SETTING_UNKNOWN_PORTS && service->flags & SERVICE_LOAD_BALANCER
		       ? vip_refuse(request, packet) : VERDICT_PASSED;
}

/*
 * Pings at ingress. Unless they are answered, those to a cluster IP in use are refused, and those to an
 * unallocated address of a service range are dropped (kube-proxy.md 6.3).
 */
static __always_inline enum verdict ping_verdict(struct __sk_buff *ctx, const struct packet *packet,
						 struct service *service)
{
	struct settings *settings = settings_read();
	struct request request = { .packet = ctx,
				   .tuple = &packet->tuple,
				   .settings = settings,
				   .ifindex = ctx->ifindex };

	if (settings->flags & SETTING_VIPS && vip_read(&packet->tuple.destination, service))
		return vip_ping(&request, packet, service);
	return selected_verdict(selected_without_service(&packet->tuple.destination));
}

#endif
