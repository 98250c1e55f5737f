/* SPDX-License-Identifier: GPL-2.0 */
/* To which nodes requests are handed by their MAC addresses (hooks/hand_over.c); only with --hand-over. */
#ifndef EBPFLB_MAPS_HANDED_H
#define EBPFLB_MAPS_HANDED_H

enum hop_family {
	HOP_IPV4 = 1,	/* packets of this family are handed to it */
	HOP_IPV6 = 2,
};

/*
 * A station of the segment that is a node, by its MAC address; without families nothing is handed to it,
 * and frames from it are not handed on either. address: the node's own, for people.
 */
struct hop {
	struct address address;
	__u32 ifindex;		/* by which device it is reached ... */
	__u8 own_mac[6];	/* ... and that device's MAC address */
	__u16 families;		/* enum hop_family */
};
SIZE(struct hop, 28);

/*
 * A frontend whose requests are handed over: the nodes to draw from are a block of handed_places. Of size
 * 0: only flows that have a node already are.
 */
struct handed_frontend {
	__u32 block;		/* each number is given once */
	__u32 base;
	__u32 size;
	__u32 by_client;	/* a boolean: the node is drawn by the client's address alone */
};
SIZE(struct handed_frontend, 16);

/* A place of a block, and one node of a block as a key: a MAC address, or zeros for this node. */
struct handed_place {
	__u8 mac[6];
	__u16 pad;
	__u32 block;
};
SIZE(struct handed_place, 12);

/* The node that a flow has got, by the block of that time. */
struct handed_flow {
	__u8 mac[6];
	__u16 pad;
	__u32 block;
	__u32 check;		/* names the flow (core/check.h) */
};
SIZE(struct handed_flow, 16);

/* The node that the later fragments of a datagram follow. */
struct handed_fragment {
	__u8 mac[6];
	__u16 pad;
	__u64 seen;		/* nanoseconds of CLOCK_MONOTONIC */
};
SIZE(struct handed_fragment, 16);

/* A bit for each address of handed_frontends, by its hash, from the highest of the first word on. */
struct address_bits {
	__u64 words[512];
};
SIZE(struct address_bits, 4096);

DEFINE_MAP(handed_addresses, ARRAY, __u32, struct address_bits, 1, RDONLY_PROG)
DEFINE_MAP(hops, HASH, struct link_address, struct hop, 16384, RDONLY_PROG | NO_PREALLOC)
DEFINE_MAP(handed_frontends, HASH, struct frontend, struct handed_frontend, 65536, RDONLY_PROG | NO_PREALLOC)
DEFINE_MAP(handed_places, ARRAY, __u32, struct handed_place, 131072, RDONLY_PROG)
DEFINE_MAP(handed_members, HASH, struct handed_place, __u32, 131072, RDONLY_PROG | NO_PREALLOC)

/* Three maps: no flood of datagrams, or of SYNs, makes a connection forget its node. */
DEFINE_MAP(handed_openings, LRU_HASH, struct tuple, struct handed_flow, 16384, NONE)
DEFINE_MAP(handed_connections, LRU_HASH, struct tuple, struct handed_flow, 65536, NONE)
DEFINE_MAP(handed_datagrams, LRU_HASH, struct tuple, struct handed_flow, 65536, NONE)
DEFINE_MAP(handed_fragments, LRU_HASH, struct fragment_key, struct handed_fragment, 8192, NONE)

#endif
