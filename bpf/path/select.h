/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The decision, the same for sockets and packets: the list that the policy allows, the backend
 * that affinity remembers, or else the one that is drawn.
 */
#ifndef EBPFLB_PATH_SELECT_H
#define EBPFLB_PATH_SELECT_H

#include "path/affinity.h"
#include "path/frontend.h"
#include "path/verdict.h"

static __always_inline enum verdict choose_sticky(const struct affinity_key *client,
						  const struct service *service,
						  const struct range *range, __u16 list,
						  __u32 draw, struct backend *backend)
{
	bool sticky = affinity_find(client, service, list, backend);

	if (!sticky) {
		if (!backend_pick(service, range, draw, backend))
			return VERDICT_RECYCLED;
		affinity_remember(client, backend->id);
	}
	service_count_chosen(service->id, sticky);
	return VERDICT_TRANSLATED;
}

static __always_inline enum verdict choose_backend(const struct affinity_key *client,
						   const struct service *service, bool confined,
						   __u32 draw, struct backend *backend)
{
	struct range range = confined ? service->local : service->cluster;
	__u16 list = confined ? BACKEND_LOCAL : BACKEND_CLUSTER;

	if (!range.size)
		return service_count_denied(service->id, service->flags & SERVICE_ENDPOINTS
								 ? VERDICT_NO_LOCAL_ENDPOINT
								 : VERDICT_REFUSED);
	if (service->affinity_seconds)
		return choose_sticky(client, service, &range, list, draw, backend);
	if (!backend_pick(service, &range, draw, backend))
		return VERDICT_RECYCLED;
	service_count_chosen(service->id, false);
	return VERDICT_TRANSLATED;
}

#endif
