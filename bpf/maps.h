/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Every map once: name, kind, key, value, entries, flags. Python reads these lines too.
 *
 * RDONLY_PROG (5.2): only the agent writes. MMAPABLE (5.5): the agent writes without a call; the
 * kernel does not map RDONLY_PROG writable.
 */
#ifndef EBPFLB_MAPS_H
#define EBPFLB_MAPS_H

#include "compat.h"
#include "layout.h"

/* A frontend's service. */
DEFINE_MAP(services, HASH, struct frontend, struct service, 65536, RDONLY_PROG)

/* The backends of all services, each service's in one block. */
DEFINE_MAP(slots, ARRAY, __u32, struct backend, 524288, MMAPABLE)

/* Backend id -> its slot; a former backend has one beyond the array. */
DEFINE_MAP(members, ARRAY, __u32, __u32, 131072, MMAPABLE)

/* The addresses of this node that serve NodePorts; loopback is not among them. */
DEFINE_MAP(node_addresses, HASH, struct address, __u32, 1024, RDONLY_PROG)

/* Which backend a client last used, for services with session affinity. */
DEFINE_MAP(affinity, LRU_HASH, struct client, struct affinity, 65536, NONE)

/* The frontend that a socket's real peer stands for: what recvmsg and getpeername show. */
DEFINE_MAP(sockets, LRU_HASH, struct peer, struct origin, 131072, NONE)

/* The backend that a datagram socket keeps for a frontend. */
DEFINE_MAP(assignments, LRU_HASH, struct sender, struct assignment, 65536, NONE)

/* One element. */
DEFINE_MAP(settings, ARRAY, __u32, struct settings, 1, RDONLY_PROG)

/* Counters, by service id, backend id and enum verdict. */
DEFINE_MAP(service_stats, PERCPU_ARRAY, __u32, struct service_counters, 65536, NONE)
DEFINE_MAP(backend_stats, PERCPU_ARRAY, __u32, struct backend_counters, 131072, NONE)
DEFINE_MAP(verdicts, PERCPU_ARRAY, __u32, __u64, 8, NONE)

/* What the ids mean; no program reads them. */
DEFINE_MAP(service_names, HASH, __u32, struct service_name, 65536, NO_PREALLOC)
DEFINE_MAP(backend_names, HASH, __u32, struct backend_name, 131072, NO_PREALLOC)

#endif
