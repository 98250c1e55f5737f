/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The rules of kube-proxy.md 4, 5 and 7, for whoever asks: a socket of this node or a packet.
 */
#ifndef EBPFLB_PATH_POLICY_H
#define EBPFLB_PATH_POLICY_H

#include "path/frontend.h"

/* Who asks. Of a socket the address is not known before its packet leaves. */
struct asker {
	struct address address;
	bool pod;		/* of this cluster, as far as the detector can tell */
};

static __always_inline bool prefix_has(const struct prefix *prefix, const struct address *address)
{
	return (address->word[0] & prefix->mask.word[0]) == prefix->address.word[0] &&
	       (address->word[1] & prefix->mask.word[1]) == prefix->address.word[1] &&
	       (address->word[2] & prefix->mask.word[2]) == prefix->address.word[2] &&
	       (address->word[3] & prefix->mask.word[3]) == prefix->address.word[3];
}

/* NO_PREFIX of the agent: its address has a bit that the mask leaves out. */
static __always_inline bool prefix_is_none(const struct prefix *prefix)
{
	return !prefix_has(prefix, &prefix->address);
}

/*
 * Whether pods can be told from others in this family. A detector that goes by devices works in
 * both; one that goes by prefixes, where it has one (kube-proxy.md 5.2).
 */
static __always_inline bool policy_detects(const struct settings *settings,
					   const struct address *family)
{
	bool none_v4 = prefix_is_none(&settings->pods_v4);
	bool none_v6 = prefix_is_none(&settings->pods_v6);

	return (settings->flags & SETTING_DETECT_LOCAL) &&
	       ((none_v4 && none_v6) || !(address_is_v4(family) ? none_v4 : none_v6));
}

/* Whether the policy Local holds for this asker: pods come to all endpoints by external addresses
 * too (kube-proxy.md 4.3), but by cluster IPs nobody does (4.1). */
static __always_inline bool policy_confines(const struct service *service, bool pod)
{
	return (service->flags & SERVICE_LOCAL) && !((service->flags & SERVICE_EXTERNAL) && pod);
}

/*
 * Whether the backend is to see this node instead of the asker (kube-proxy.md 5.1). One exception
 * is ours: a backend here sees an external client as it is, if its answers pass here anyway.
 */
static __always_inline bool policy_masquerades(const struct settings *settings,
					       const struct service *service,
					       const struct backend *backend,
					       const struct asker *asker)
{
	if (address_equal(&asker->address, &backend->address))
		return true;
	if (!(service->flags & SERVICE_EXTERNAL))
		return (settings->flags & SETTING_MASQUERADE_ALL) ||
		       (policy_detects(settings, &asker->address) && !asker->pod);
	if (service->flags & SERVICE_LOCAL)
		return false;
	return asker->pod || !(backend->flags & BACKEND_HERE) ||
	       (settings->flags & SETTING_MASQUERADE_HERE);
}

/* loadBalancerSourceRanges (kube-proxy.md 7). */
static __always_inline bool policy_admits(const struct service *service,
					  const struct address *address)
{
	struct source_range client = { .length = 32 + 128,
				       .service = service->id,
				       .address = *address };

	return !(service->flags & SERVICE_RESTRICTED) ||
	       LOOKUP(__u32, source_ranges, &client) != NULL;
}

/*
 * What becomes of those who ask for no frontend of ours (kube-proxy.md 6.3): a cluster IP refuses
 * what it does not serve, and an address that is kept for cluster IPs swallows everything.
 */
static __always_inline enum verdict policy_unserved(const struct address *address)
{
	struct settings *settings = settings_read();
	struct service_range range = { .length = 128, .address = *address };

	if (!settings || !(prefix_has(&settings->span_v4, address) ||
			   prefix_has(&settings->span_v6, address)))
		return VERDICT_PASSED;
	if (LOOKUP(__u32, cluster_ips, address))
		return VERDICT_REFUSED;
	return LOOKUP(__u32, service_ranges, &range) ? VERDICT_UNALLOCATED : VERDICT_PASSED;
}

#endif
