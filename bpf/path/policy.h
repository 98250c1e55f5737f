/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The rules of kube-proxy.md 4 to 7, the same for sockets and packets: which endpoints a client may
 * use, who is admitted, whose packets need SNAT, and what becomes of addresses that no service has.
 */
#ifndef EBPFLB_PATH_POLICY_H
#define EBPFLB_PATH_POLICY_H

#include "net/address.h"
#include "path/settings.h"

/*
 * Whether only local endpoints count. By external addresses pods reach all endpoints, whatever the
 * policy (kube-proxy.md 4.3); by cluster IPs the policy holds for everyone (4.1).
 */
static __always_inline bool policy_is_local_only(const struct service *service, bool is_local_client)
{
	return (service->flags & SERVICE_LOCAL) &&
	       !((service->flags & SERVICE_EXTERNAL) && is_local_client);
}

/* loadBalancerSourceRanges (kube-proxy.md 7). */
static __always_inline bool policy_admits(const struct service *service,
					  const struct address *client)
{
	struct source_range range = { .length = 32 + 128,
				      .service = service->id,
				      .address = *client };

	return !(service->flags & SERVICE_RESTRICTED) ||
	       LOOKUP(__u32, source_ranges, &range) != NULL;
}

/* NO_PREFIX of the agent: its address has a bit that the mask leaves out. */
static __always_inline bool prefix_is_none(const struct prefix *prefix)
{
	return !prefix_has(prefix, &prefix->address);
}

/*
 * Whether pods can be recognized in this family. A detector that goes by devices works in
 * both families; one that goes by prefixes works where it has one (kube-proxy.md 5.2).
 */
static __always_inline bool policy_detects_local(const struct settings *settings,
						const struct address *family)
{
	bool none_v4 = prefix_is_none(&settings->pods_v4);
	bool none_v6 = prefix_is_none(&settings->pods_v6);

	return (settings->flags & SETTING_DETECT_LOCAL) &&
	       ((none_v4 && none_v6) || !(address_is_v4(family) ? none_v4 : none_v6));
}

/*
 * Whether the backend must see this node instead of the client (kube-proxy.md 5.1). One exception
 * is ours: for a backend on this node that an external client reaches under policy Cluster it is
 * enough that the replies pass here (client_is_symmetric), unless the operator says otherwise.
 */
static __always_inline bool policy_needs_snat(const struct settings *settings,
					      const struct selection *selection,
					      const struct address *client)
{
	const struct service *service = &selection->service;

	if (address_equal(client, &selection->backend.address))
		return true;
	if (!(service->flags & SERVICE_EXTERNAL))
		return (settings->flags & SETTING_MASQUERADE_ALL) ||
		       (policy_detects_local(settings, client) && !selection->is_local_client);
	if (service->flags & SERVICE_LOCAL)
		return false;
	return selection->is_local_client || !(selection->backend.flags & BACKEND_HERE) ||
	       (settings->flags & SETTING_MASQUERADE_HERE);
}

/* What an address without a service is to the cluster. */
enum address_use { NOT_OURS, CLUSTER_IP, UNALLOCATED };

static __always_inline enum address_use address_use(const struct address *address)
{
	struct settings *settings = settings_read();
	struct service_range range = { .length = 128, .address = *address };

	if (!settings || !(prefix_has(&settings->span_v4, address) ||
			   prefix_has(&settings->span_v6, address)))
		return NOT_OURS;
	if (LOOKUP(__u32, cluster_ips, address))
		return CLUSTER_IP;
	return LOOKUP(__u32, service_ranges, &range) ? UNALLOCATED : NOT_OURS;
}

/*
 * What becomes of a request that no service takes (kube-proxy.md 6.3): a cluster IP refuses the
 * ports that it does not serve, and an address that no service has is dropped.
 */
static __always_inline enum verdict no_service_verdict(enum address_use use)
{
	return use == CLUSTER_IP ? VERDICT_REFUSED
	       : use == UNALLOCATED ? VERDICT_UNALLOCATED : VERDICT_PASSED;
}

#endif
