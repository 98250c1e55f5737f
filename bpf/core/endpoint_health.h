/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Notes connections that opened, or failed to open, for --endpoint-health. The agent reads
 * backend_health, and decides (ebpflb/model/endpoint_health.py).
 *
 * Only a client whose last connection to the service opened can fail: afterwards it has to reach the
 * service again, by any backend. So a client whose packets are dropped on their way, as by a
 * NetworkPolicy, says nothing about backends, however often it tries.
 *
 * A client is in service_clients from a connection that opened until one fails: only one of many that
 * fail at once removes it, and counts. Two CPUs may write the same backend's value at once: then a failure
 * or a success is lost. Three clients have to agree.
 */
#ifndef EBPFLB_CORE_ENDPOINT_HEALTH_H
#define EBPFLB_CORE_ENDPOINT_HEALTH_H

#include "core/settings.h"

#define FAILURES_COUNT (60 * SECOND)	/* from the first one on */

/* The client has reached the service, by whatever backend. */
static __always_inline void service_reached(const struct service_client *client)
{
	__u32 yes = true;

	if (!LOOKUP(__u32, service_clients, client))
		bpf_map_update_elem(MAP(service_clients), client, &yes, BPF_ANY);
}

static __always_inline void endpoint_opened(const struct service_client *client, __u32 backend)
{
	struct service_backend key = { .service = client->service, .backend = backend };
	struct backend_health *health = LOOKUP(struct backend_health, backend_health, &key);

	service_reached(client);
	if (!health || (health->has_opened && !health->first))
		return;
	health->first = 0;
	health->second = 0;
	health->third = 0;
	health->has_opened = true;
}

static __always_inline void failure_begin(const struct service_client *client,
					  const struct service_backend *key, __u32 has_opened)
{
	struct backend_health health = { .since = bpf_ktime_get_ns(),
					 .first = client->client,
					 .has_opened = has_opened };

	bpf_map_update_elem(MAP(backend_health), key, &health, BPF_ANY);
}

static __always_inline void endpoint_failed(const struct service_client *client, __u32 backend)
{
	struct service_backend key = { .service = client->service, .backend = backend };
	struct backend_health *health;

	if (bpf_map_delete_elem(MAP(service_clients), client))
		return;
	health = LOOKUP(struct backend_health, backend_health, &key);
	if (!health)
		failure_begin(client, &key, false);
	else if (!health->first || bpf_ktime_get_ns() > health->since + FAILURES_COUNT)
		failure_begin(client, &key, health->has_opened);
	else if (health->first == client->client || health->second == client->client)
		return;
	else if (!health->second)
		health->second = client->client;
	else
		health->third = client->client;
}

#endif
