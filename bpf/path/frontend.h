/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Which service has this frontend? (kube-proxy.md 4)
 *
 * A frontend is matched exactly. Only if there is none, and the address is this node's, a NodePort
 * is looked up. On loopback, NodePorts are served in the node's own namespace alone: a pod's
 * loopback is not the node's.
 */
#ifndef EBPFLB_PATH_FRONTEND_H
#define EBPFLB_PATH_FRONTEND_H

#include "net/address.h"
#include "path/settings.h"

enum found { ABSENT, FOUND, RECYCLED };

static __always_inline bool node_serves(const struct address *address, __u64 netns)
{
	if (address_is_loopback(address))
		return netns != NO_NETNS && netns_is_host(netns);
	return LOOKUP(__u32, node_addresses, address) != NULL;
}

/*
 * Whether packets of a socket to this address stay within the node's own namespace: they pass
 * loopback, which has no hooks, and nothing could drop them there.
 */
static __always_inline bool address_is_own(const struct address *address, __u64 netns)
{
	return netns_is_host(netns) && (address_is_loopback(address) ||
					LOOKUP(__u32, own_addresses, address) != NULL);
}

static __always_inline struct frontend nodeport_of(const struct frontend *frontend)
{
	return (struct frontend){ .address = address_any(&frontend->address),
				  .port = frontend->port,
				  .protocol = frontend->protocol };
}

/*
 * A map's element may be freed and given to another key while it is copied; then it names another
 * frontend. The kernel writes a value from its head on, so the head is compared last.
 */
static __always_inline enum found service_read(const struct frontend *frontend,
					       struct service *service)
{
	struct service *found = LOOKUP(struct service, services, frontend);

	if (!found)
		return ABSENT;
	*service = *found;
	barrier();
	return frontend_equal(&found->frontend, frontend) ? FOUND : RECYCLED;
}

/* The service at the frontend of a packet; 0 if there is none, or the element was recycled. */
static __always_inline __u32 service_id_at(const struct frontend *frontend)
{
	struct service *found = LOOKUP(struct service, services, frontend);
	struct frontend nodeport = nodeport_of(frontend);
	bool is_nodeport = !found && node_serves(&frontend->address, NO_NETNS);
	__u32 id;

	if (is_nodeport)
		found = LOOKUP(struct service, services, &nodeport);
	if (!found)
		return 0;
	id = found->id;
	barrier();
	return frontend_equal(&found->frontend, is_nodeport ? &nodeport : frontend) ? id : 0;
}

static __always_inline enum found service_find(const struct frontend *frontend, __u64 netns,
					       struct service *service)
{
	enum found found = ABSENT;

	if (!address_is_any(&frontend->address))
		found = service_read(frontend, service);
	if (found == ABSENT && node_serves(&frontend->address, netns)) {
		struct frontend nodeport = nodeport_of(frontend);

		found = service_read(&nodeport, service);
	}
	return found;
}

#endif
