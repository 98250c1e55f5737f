/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The first question: is this a frontend of ours, and of which service?
 *
 * A frontend is matched exactly. Only then, and only on an address of this node, NodePorts are
 * asked (kube-proxy.md 4). Loopback serves NodePorts in the node's own namespace alone: a pod's
 * loopback is not the node's.
 */
#ifndef EBPFLB_PATH_FRONTEND_H
#define EBPFLB_PATH_FRONTEND_H

#include "maps.h"
#include "net/address.h"

static __always_inline struct settings *settings_read(void)
{
	__u32 only = 0;

	return LOOKUP(struct settings, settings, &only);
}

#define NO_NETNS 0	/* a packet's: no socket asks */

/* Before 5.14 the agent hears its cookie from hooks/netns_cookie.c; 0 means the initial namespace. */
static __always_inline bool netns_is_host(__u64 netns)
{
	struct settings *settings = settings_read();

	if (!settings)
		return false;
	if (!settings->host_netns)
		return netns == get_netns_cookie(NULL);
	return netns == settings->host_netns;
}

static __always_inline bool node_serves(const struct address *address, __u64 netns)
{
	if (address_is_loopback(address))
		return netns != NO_NETNS && netns_is_host(netns);
	return LOOKUP(__u32, node_addresses, address) != NULL;
}

static __always_inline struct frontend nodeport_of(const struct frontend *to)
{
	return (struct frontend){
		.address = address_any(&to->address),
		.port = to->port,
		.protocol = to->protocol,
	};
}

enum found { ABSENT, FOUND, RECYCLED };

/* What a packet asks for. */
static __always_inline struct frontend frontend_asked(const struct tuple *tuple)
{
	return (struct frontend){ .address = tuple->destination,
				  .port = tuple->destination_port,
				  .protocol = tuple->protocol };
}

/*
 * A map's element may be freed and given to another key while we copy it; then it names another
 * frontend. The kernel writes a value from its head on, so the head is looked at last.
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

static __always_inline enum found service_find(const struct frontend *to, __u64 netns,
					       struct service *service)
{
	enum found found = ABSENT;

	if (!address_is_any(&to->address))
		found = service_read(to, service);
	if (found == ABSENT && node_serves(&to->address, netns)) {
		struct frontend nodeport = nodeport_of(to);

		found = service_read(&nodeport, service);
	}
	return found;
}

#endif
