/* SPDX-License-Identifier: GPL-2.0 */
/* The maps that every layout creates anew: settings of this node, verdicts, short-lived state. */
#ifndef EBPFLB_MAPS_PER_VERSION_H
#define EBPFLB_MAPS_PER_VERSION_H

/* One element. */
DEFINE_MAP(settings, ARRAY, __u32, struct settings, 1, RDONLY_PROG)

/* Copies of the entries of services (rules/frontend.h). */
DEFINE_MAP(service_places, ARRAY, __u32, struct service_place, 65536, MMAPABLE)

/* The addresses of this node that serve NodePorts; loopback is not among them. */
DEFINE_MAP(node_addresses, HASH, struct address, __u32, 1024, RDONLY_PROG)

/* All addresses of this node. What its own sockets send to one passes no device but loopback. */
DEFINE_MAP(own_addresses, HASH, struct address, __u32, 4096, RDONLY_PROG | NO_PREALLOC)

/* Those of all devices of this node. A bridge passes a frame to another address on, to another machine. */
DEFINE_MAP(link_addresses, HASH, struct link_address, __u32, 16384, RDONLY_PROG | NO_PREALLOC)

/* This node's devices. */
DEFINE_MAP(devices, HASH, __u32, struct device, 16384, RDONLY_PROG | NO_PREALLOC)

/* The ranges of all cluster IPs. */
DEFINE_MAP(service_ranges, LPM_TRIE, struct service_range, __u32, 64, RDONLY_PROG | NO_PREALLOC)

/* One element. */
DEFINE_MAP(flow_gate, ARRAY, __u32, struct flow_gate, 1, MMAPABLE)

/*
 * Where no frontend is: a bit for each place of a frontend, then one for each port of NodePorts. Bits
 * that are not set say nothing (rules/frontend.h).
 */
DEFINE_MAP(no_frontends, ARRAY, __u32, __u64, 17408, MMAPABLE)

/* When a flow loses its port to another: the sweeps' timeouts (ebpflb/entries/flows.py). */
DEFINE_MAP(timeouts, HASH, struct timeout_key, struct timeout, 512, RDONLY_PROG)

/* The ports of datagrams that come in fragments. */
DEFINE_MAP(fragments, LRU_HASH, struct fragment_key, struct fragment_ports, 8192, NONE)

/* Connections to a frontend's address that this node only forwards. */
DEFINE_MAP(forwarded, LRU_HASH, struct tuple, struct forwarded, 8192, NONE)

/*
 * What packets got last on the engine netfilter, by a hash of their tuple. Datagrams are in it for a
 * second at a time, and in udp_choices.
 */
DEFINE_MAP(recent_choices, ARRAY, __u32, struct recent_choice, 65536, NONE)

/* The backend that the datagrams of a flow get, on the engine netfilter. */
DEFINE_MAP(udp_choices, LRU_HASH, struct tuple, struct datagram_choice, 65536, NONE)

/* Requests of UDP flows whose backend was removed. A ring buffer of this many bytes (5.8). */
DEFINE_MAP(moved_flows, RINGBUF, __u32, struct tuple, 262144, NONE)

/* The clients whose last connection to a service opened (core/endpoint_health.h); the value is always 1. */
DEFINE_MAP(service_clients, LRU_HASH, struct service_client, __u32, 16384, NONE)

/* Those to which connections did not open. */
DEFINE_MAP(backend_health, LRU_HASH, struct service_backend, struct backend_health, 16384, NONE)

/* By the tuple of the first SYN at ingress (path/attempt.h). */
DEFINE_MAP(attempts, LRU_HASH, struct tuple, struct attempt, 16384, NONE)

/* Sockets that may move to another endpoint, by their cookies (sockets/quiet.h). */
DEFINE_MAP(quiet_sockets, HASH, __u64, struct quiet_socket, 8192, NO_PREALLOC)

/* Connections of sockets that did not open, by the id of a service whose connections move. */
DEFINE_MAP(failed_openings, HASH, __u32, __u64, 4096, NO_PREALLOC)

/* By service id. */
DEFINE_MAP(rotations, ARRAY, __u32, struct rotation, 65536, NONE)

/* Counters, by enum verdict. */
DEFINE_MAP(verdicts, PERCPU_ARRAY, __u32, __u64, 26, NONE)

/* The first element is for refusals, each other one for answers to the pings of some clients. */
DEFINE_MAP(reject_budgets, PERCPU_ARRAY, __u32, struct reject_budget, 257, NONE)

/* One element. */
DEFINE_MAP(scratch, PERCPU_ARRAY, __u32, struct scratch, 1, NONE)

#endif
