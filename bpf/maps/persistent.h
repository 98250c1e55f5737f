/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The maps that an upgrade keeps: services, backends, flows, sockets and their counters, which
 * refer to each other by ids. All of them are kept if this file and what it includes are the same
 * in both versions, so that ids and flags mean the same; otherwise none. Comments may differ.
 */
#ifndef EBPFLB_MAPS_PERSISTENT_H
#define EBPFLB_MAPS_PERSISTENT_H

#include "layout/address.h"
#include "layout/check.h"
#include "layout/service.h"
#include "layout/affinity.h"
#include "layout/socket.h"
#include "layout/flow.h"
#include "layout/connection.h"
#include "layout/counters.h"

/* A frontend's service. */
DEFINE_MAP(services, HASH, struct frontend, struct service, 65536, RDONLY_PROG)

/* The backends of all services, each service's in one block. */
DEFINE_MAP(slots, ARRAY, __u32, struct backend, 524288, MMAPABLE)

/* The tables of services that have one; the slots in them are the service's. */
DEFINE_MAP(choices, ARRAY, __u32, struct choice, 1048576, MMAPABLE)

/* Backend id -> its slot; a removed backend's is beyond the array. */
DEFINE_MAP(backend_slots, ARRAY, __u32, __u32, 131072, MMAPABLE)

/* loadBalancerSourceRanges, and those of NodePorts, by service id. */
DEFINE_MAP(source_ranges, LPM_TRIE, struct source_range, __u32, 65536, RDONLY_PROG | NO_PREALLOC)

/* The cluster IPs in use, whatever their ports. */
DEFINE_MAP(cluster_ips, HASH, struct address, __u32, 65536, RDONLY_PROG | NO_PREALLOC)

/* The names behind the ids; no program reads them. */
DEFINE_MAP(service_names, HASH, __u32, struct service_name, 65536, NO_PREALLOC)
DEFINE_MAP(backend_names, HASH, __u32, struct backend_name, 131072, NO_PREALLOC)

/* Which backend a client last used, for services with session affinity. */
DEFINE_MAP(affinity, LRU_HASH, struct affinity_key, struct affinity, 65536, NONE)

/* The same, of sources of packets that may be forged: no flow of theirs has been answered yet. */
DEFINE_MAP(new_affinity, LRU_HASH, struct affinity_key, struct affinity, 65536, NONE)

/*
 * What is remembered of a socket has its place by the cookie modulo the number of places. Only a socket
 * whose place another one has is in the hash `sockets`, by its cookie. No LRU: an entry is there until
 * its socket is released, so what is counted by it is exact, and a write costs less. Sockets that the
 * kernel never releases are swept by the agent.
 */
DEFINE_MAP(socket_places, ARRAY, __u32, struct socket_place, 131072, NONE)
DEFINE_MAP(sockets, HASH, __u64, struct socket_entry, 65536, NONE)
DEFINE_MAP(sockets_full, ARRAY, __u32, struct sockets_full, 1, NONE)

/* Further frontends of datagram sockets, and all that were sent to while `sockets` was full. */
DEFINE_MAP(assignments, LRU_HASH, struct assignment_key, struct socket_entry, 65536, NONE)

/* The frontends that their backends' replies are from. */
DEFINE_MAP(peers, LRU_HASH, struct peer, struct peer_frontend, 65536, NONE)

/*
 * Who has an open connection that is counted. No LRU: what it evicted would count for ever. Where it
 * is full connections are opened, and not counted.
 */
DEFINE_MAP(connections, HASH, struct assignment_key, struct connection, 262144, NO_PREALLOC)
DEFINE_MAP(backend_loads, ARRAY, __u32, struct backend_load, 131072, MMAPABLE)

/*
 * Flows of the packet path. Two maps, so that a flood of datagrams evicts no connection. Each has
 * space for the four entries of HALF_OPEN_FLOWS, and for 262,144 or 131,072 more.
 */
DEFINE_MAP(tcp_flows, LRU_HASH, struct tuple, struct flow, 327680, NONE)
DEFINE_MAP(other_flows, LRU_HASH, struct tuple, struct flow, 196608, NONE)

/* The latest flows of tcp_flows, then those of other_flows; HALF_OPEN_FLOWS of each. */
DEFINE_MAP(half_open, ARRAY, __u32, struct half_open, 32768, NONE)

/* Of tcp_flows (0) and other_flows (1): what packets and what sweeps have done to them. */
DEFINE_MAP(flow_stats, PERCPU_ARRAY, __u32, struct flow_counters, 2, NONE)
DEFINE_MAP(sweeps, ARRAY, __u32, struct sweep, 2, NONE)

/* One element: drawn at random when this map is made, mixed into the draw of a packet's backend. */
DEFINE_MAP(secret, ARRAY, __u32, __u64, 1, RDONLY_PROG)

/* Counters, by service id and backend id. */
DEFINE_MAP(service_stats, CPU_ARRAYS, __u32, struct service_counters, 65536, MMAPABLE)
DEFINE_MAP(backend_stats, CPU_ARRAYS, __u32, struct backend_counters, 131072, MMAPABLE)

#endif
