/* SPDX-License-Identifier: GPL-2.0 */
/* This node and its settings, written by the agent; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_NODE_H
#define EBPFLB_LAYOUT_NODE_H

enum device_flag {
	DEVICE_PODS = 1,	/* packets that come in here are from pods (detect-local by interface) */
	DEVICE_HOST_ONLY = 2,	/* no switch takes frames from here: those to other hosts go nowhere */
	DEVICE_MASTER = 4,	/* a bridge or VRF: packets pass the program at a port first, if it has one */
	DEVICE_BRIDGED = 8,	/* a port of the kernel's bridge, which keeps frames to link_addresses */
	DEVICE_ALL_PORTS = 16,	/* a bridge or VRF: no port is without the program */
};

/*
 * A device: the addresses for masqueraded flows that leave by it, where the kernel names no other
 * one; unspecified: none; such flows are dropped (ports_exhausted).
 */
struct device {
	struct address v4;
	struct address v6;
	__u32 flags;		/* enum device_flag */
};
SIZE(struct device, 36);

/* A MAC address. */
struct link_address {
	__u8 byte[6];
	__u16 pad;
};
SIZE(struct link_address, 8);

/* All addresses that equal address under mask; none if address has a bit outside of mask. */
struct prefix {
	struct address address;
	struct address mask;
};
SIZE(struct prefix, 32);

enum setting_flag {
	SETTING_GUARD_NODEPORTS = 1,	/* bind() to a NodePort in the node's own network namespace fails */
	SETTING_MASQUERADE_ALL = 2,	/* requests to cluster IPs too, from any client */
	SETTING_MASQUERADE_HERE = 4,	/* external clients of a backend on this node too */
	SETTING_DETECT_LOCAL = 8,	/* pods are recognized, by pods_* or DEVICE_PODS */
	SETTING_ATTACHING = 16,	/* a device may have no program at egress: the flow tables open no flow */
	SETTING_NETFILTER = 32,	/* the kernel's NAT translates new flows, by our table of nftables */
	SETTING_HOST_SOCKETS = 64,	/* pods' sockets are left to the packet path */
	SETTING_REPLY_TO_DEVICE = 128,	/* replies leave where their requests came in */
	SETTING_SHADOW = 256,	/* new decisions are counted, and not carried out */
	SETTING_NETFILTER_SCTP = 1024,	/* SCTP's too: the kernel's NAT can translate it */
	SETTING_ANSWER_PINGS = 2048,	/* to addresses of services that have endpoints */
	SETTING_UNKNOWN_PORTS = 4096,	/* of load balancers' addresses are not led back to the router ... */
	SETTING_UNKNOWN_REJECT = 8192,	/* ... but refused ... */
	SETTING_UNKNOWN_DROP = 16384,	/* ... or dropped */
};

/* The state of a flow with a port that this node allocated. */
struct timeout_key {
	__u8 protocol;
	__u8 is_stream;		/* UDP: it has lasted longer than stream_after */
	__u8 request_flags;	/* enum flow_flag but FLOW_MASQUERADE; 0: the reply's entry is alone */
	__u8 reply_flags;
};
SIZE(struct timeout_key, 4);

/* Times in seconds. */
struct timeout {
	__u32 idle;		/* after this time idle, a flow loses its port to another */
	__u32 kept;		/* before this time, no other flow may take its port */
};
SIZE(struct timeout, 8);

/* What the operator configured, and what the agent detected about this node. */
struct settings {
	__u64 host_netns;	/* cookie of the node's own network namespace; 0: the initial one */
	__u64 writes;		/* odd while the agent is writing the maps */
	__u32 flags;		/* enum setting_flag */
	__u16 first_port;	/* masqueraded flows get source ports from here ... */
	__u16 last_port;	/* ... to here, in host order */
	__u32 mark;		/* of packets that are translated at ingress: these bits ... */
	__u32 mark_mask;	/* ... of these; 0: the mark is left alone */
	struct prefix pods_v4;	/* addresses of pods */
	struct prefix pods_v6;
	struct prefix span_v4;	/* includes all cluster IPs and service ranges */
	struct prefix span_v6;
	struct address node_v4;	/* the node's primary addresses, or unspecified */
	struct address node_v6;
	__u32 frontend_moves;	/* grows after UDP frontends got another service; never 0 */
	__u32 stream_after;	/* seconds after which an answered flow of UDP is a stream */
	__u32 udp_timeout;	/* seconds of silence after which a socket may get another backend */
	__u32 udp_stream_timeout;	/* the same, of one that has had replies for a while */
	__u32 last_service;	/* the ids that were given last; no program reads them */
	__u32 last_backend;
	__u32 service_places;	/* the size of this map */
	__u32 pad;
};
SIZE(struct settings, 224);

#endif
