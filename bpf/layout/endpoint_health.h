/* SPDX-License-Identifier: GPL-2.0 */
/* Which clients reach a service, and which backends they fail to reach; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_ENDPOINT_HEALTH_H
#define EBPFLB_LAYOUT_ENDPOINT_HEALTH_H

/* A client of a service. */
struct service_client {
	__u64 client;		/* cookie of a socket's network namespace, or what names a packet's source */
	__u32 service;
	__u32 pad;
};
SIZE(struct service_client, 16);

/* A backend, and the service that it serves: another service's may get its id later. */
struct service_backend {
	__u32 service;
	__u32 backend;
};
SIZE(struct service_backend, 8);

/* What has happened at a backend since a client failed to reach it. */
struct backend_health {
	__u64 since;		/* of the first failure, in nanoseconds of CLOCK_MONOTONIC */
	__u64 first;		/* the clients that have failed since then, each once; 0: none */
	__u64 second;
	__u64 third;
	__u32 has_opened;	/* a connection has opened before these failures; the agent clears it */
	__u32 pad;
};
SIZE(struct backend_health, 40);

/* A TCP connection of the packet path that has had no answer yet. */
struct attempt {
	__u64 client;
	__u64 since;		/* of its first SYN, in nanoseconds of CLOCK_MONOTONIC */
	__u32 service;
	__u32 backend;		/* that the first SYN got */
	__u32 has_failed;	/* a later SYN has been counted as a failure */
	__u32 pad;
};
SIZE(struct attempt, 32);

#endif
