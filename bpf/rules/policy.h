/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The rules of kube-proxy.md 4 to 7, the same for sockets and packets: which endpoints a client may
 * use, which clients are admitted, which flows need SNAT, and what an address is used for.
 */
#ifndef EBPFLB_RULES_POLICY_H
#define EBPFLB_RULES_POLICY_H

#include "net/address.h"
#include "record/record.h"
#include "core/settings.h"

/*
 * Whether only this node's endpoints may be used. At external addresses local clients use all
 * endpoints, whatever the policy (kube-proxy.md 4.3); at cluster IPs the policy holds for every
 * client (4.1).
 */
static __always_inline bool policy_is_local_only(const struct service *service,
						 bool is_local_client)
{
	return (service->flags & SERVICE_LOCAL) &&
	       !((service->flags & SERVICE_EXTERNAL) && is_local_client);
}

/*
 * loadBalancerSourceRanges (kube-proxy.md 7), and the source ranges of NodePorts, which kube-proxy
 * has not.
 */
static __always_inline bool policy_admits(const struct service *service,
					  const struct address *client)
{
	struct source_range range = { .length = 64 + 128,
				      .service = service->id,
				      .nodeport = (service->flags & SERVICE_NODEPORT) != 0,
				      .address = *client };

	return !(service->flags & SERVICE_RESTRICTED) ||
	       LOOKUP(__u32, source_ranges, &range) != NULL;
}

/* Whether the prefix is the agent's NO_PREFIX: its address has a bit outside of its mask. */
static __always_inline bool prefix_is_none(const struct prefix *prefix)
{
	return !prefix_has(prefix, &prefix->address);
}

/*
 * Whether detect-local is active in this family (kube-proxy.md 5.2): by devices in both families,
 * by prefixes in a family that has one.
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
 * Whether the backend must see this node instead of the client (kube-proxy.md 5.1), and why. Unlike in
 * kube-proxy, external clients of a backend on this node under policy Cluster are masqueraded only
 * with SETTING_MASQUERADE_HERE, or if the replies would not pass here (client_is_symmetric).
 */
static __always_inline enum masquerade_reason
policy_masquerades(const struct settings *settings, const struct selection *selection,
		   const struct address *client)
{
	const struct service *service = &selection->service;

	if (address_equal(client, &selection->backend.address))
		return MASQUERADE_HAIRPIN;
	if (!(service->flags & SERVICE_EXTERNAL)) {
		if (settings->flags & SETTING_MASQUERADE_ALL)
			return MASQUERADE_ALL;
		return policy_detects_local(settings, client) && !selection->is_local_client
			       ? MASQUERADE_NOT_POD : MASQUERADE_NONE;
	}
	if (service->flags & SERVICE_LOCAL)
		return MASQUERADE_NONE;
	if (selection->is_local_client)
		return MASQUERADE_LOCAL_CLIENT;
	if (!(selection->backend.flags & BACKEND_HERE))
		return MASQUERADE_ELSEWHERE;
	return settings->flags & SETTING_MASQUERADE_HERE ? MASQUERADE_HERE : MASQUERADE_NONE;
}

/* Whether the address may be a cluster IP, or in a service range; nothing is looked up. */
static __always_inline bool address_may_have_use(const struct address *address)
{
	struct settings *settings = settings_read();

	return prefix_has(&settings->span_v4, address) || prefix_has(&settings->span_v6, address);
}

/*
 * What the cluster uses an address for when no frontend matches. CLUSTER_IP: a service has this
 * address. UNALLOCATED: it is in a service range, but no service has it.
 */
enum address_use { NOT_OURS, CLUSTER_IP, UNALLOCATED };

static __always_inline enum address_use address_use(const struct address *address)
{
	struct service_range range = { .length = 128, .address = *address };

	if (!address_may_have_use(address))
		return NOT_OURS;
	if (LOOKUP(__u32, cluster_ips, address))
		return CLUSTER_IP;
	return LOOKUP(__u32, service_ranges, &range) ? UNALLOCATED : NOT_OURS;
}

#endif
