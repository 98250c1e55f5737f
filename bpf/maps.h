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

/* Flows through the packet path; apart, so that a flood of datagrams evicts no connection. */
DEFINE_MAP(tcp_flows, LRU_HASH, struct tuple, struct flow, 262144, NONE)
DEFINE_MAP(other_flows, LRU_HASH, struct tuple, struct flow, 131072, NONE)

/* The ports of datagrams that come in fragments. */
DEFINE_MAP(fragments, LRU_HASH, struct datagram, struct ports, 8192, NONE)

/* loadBalancerSourceRanges, by service id; and the ranges of all cluster IPs. */
DEFINE_MAP(source_ranges, LPM_TRIE, struct source_range, __u32, 65536, RDONLY_PROG | NO_PREALLOC)
DEFINE_MAP(service_ranges, LPM_TRIE, struct service_range, __u32, 64, RDONLY_PROG | NO_PREALLOC)

/* The cluster IPs in use, whatever their ports. */
DEFINE_MAP(cluster_ips, HASH, struct address, __u32, 65536, RDONLY_PROG | NO_PREALLOC)

/* This node's devices. */
DEFINE_MAP(devices, HASH, __u32, struct device, 16384, RDONLY_PROG | NO_PREALLOC)

/* One element. */
DEFINE_MAP(settings, ARRAY, __u32, struct settings, 1, RDONLY_PROG)

/* Counters, by service id, backend id and enum verdict. */
DEFINE_MAP(service_stats, PERCPU_ARRAY, __u32, struct service_counters, 65536, NONE)
DEFINE_MAP(backend_stats, PERCPU_ARRAY, __u32, struct backend_counters, 131072, NONE)
DEFINE_MAP(verdicts, PERCPU_ARRAY, __u32, __u64, 18, NONE)

/* Of tcp_flows (0) and other_flows (1): what packets and what sweeps did. */
DEFINE_MAP(flow_stats, PERCPU_ARRAY, __u32, struct flow_counters, 2, NONE)
DEFINE_MAP(sweeps, ARRAY, __u32, struct sweep, 2, NONE)

/* One element each. */
DEFINE_MAP(allowances, PERCPU_ARRAY, __u32, struct allowance, 1, NONE)
DEFINE_MAP(arrivals, PERCPU_ARRAY, __u32, struct arrival, 1, NONE)

/* What the ids mean; no program reads them. */
DEFINE_MAP(service_names, HASH, __u32, struct service_name, 65536, NO_PREALLOC)
DEFINE_MAP(backend_names, HASH, __u32, struct backend_name, 131072, NO_PREALLOC)

#endif
