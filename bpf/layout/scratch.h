/* SPDX-License-Identifier: GPL-2.0 */
/* The data that a program keeps for one packet or one second, on one CPU; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_SCRATCH_H
#define EBPFLB_LAYOUT_SCRATCH_H

/* The packet that a program handles, as it was read (net/packet.h). */
struct packet {
	struct tuple tuple;	/* without ports where piece is LATER, and for ICMP */
	__u32 transport;	/* offset of the transport header */
	__u32 end;		/* offset where the IP packet ends */
	__u32 second;		/* of the transport header's words; UDP: length and checksum */
	__u32 id;		/* of the datagram of which this is a fragment */
	__u8 piece;		/* enum piece */
	__u8 v6;
	__u8 options;		/* there are IP options or extension headers */
	__u8 opens;		/* a flow may begin with it: any datagram, SYN, INIT */
	__u32 ends;		/* FLOW_FIN, FLOW_RST: its sender has closed or reset the flow */
	/* of TCP segments but for later fragments, in host order */
	__u32 sequence;
	__u32 acknowledgment;
	__u32 bytes;		/* of the sequence space: the payload, SYN and FIN */
	/* of SCTP packets, in host order, by their first chunk */
	__u32 tag;		/* the verification tag */
	__u32 initiate_tag;	/* of INIT and INIT ACK (RFC 9260 3.3.2); else 0 */
	__u8 reflected;		/* SCTP_REFLECTED */
	__u8 header;		/* of a TCP segment: its length in bytes */
	__u8 control;		/* its bits as TCP_SYN (RFC 9293 3.1); 0: no segment */
	__u8 is_bridged;	/* at ingress: a bridge passes it on to another host, beside the stack */
};
SIZE(struct packet, 88);

/* The result of select_backend (path/select_backend.h). */
struct selection {
	struct backend backend;
	struct service service;
	__u8 is_local_client;	/* client_is_local (core/client.h) */
	__u8 is_assigned;	/* a datagram socket keeps the backend that it has */
	__u8 is_pending;	/* session affinity is to be remembered once the client is known */
	__u8 pad;
};
SIZE(struct selection, 120);

/* The tuples of a flow that ends because another gets its port, or its place in half_open. */
struct ending {
	struct tuple between;	/* its requests at egress, before SNAT */
	struct tuple reply_tuple;
	struct tuple request_tuple;
};
SIZE(struct ending, 120);

/* The ports that are tried for a flow (engine/flows/port.h). */
struct port_sequence {
	__u32 first;
	__u32 size;	/* how many ports there are */
	__u32 next;	/* the next one's distance from the first */
	__u32 step;
};
SIZE(struct port_sequence, 16);

/*
 * Where a packet goes. If ingress also does the work of egress (path/reply_to_device.h), the packet
 * is translated twice.
 */
struct onward {
	struct tuple to;	/* what the packet's tuple becomes */
	struct flow known;	/* a copy of its entry at this hook (flow_copy) */
	struct tuple between;	/* the packet between the hooks, as egress would see it */
	struct flow second;	/* a copy of its entry there */
	struct tuple after;	/* the packet after egress */
	__u32 device;		/* by which the packet has to leave; 0: by its route */
	__u16 mtu;		/* VERDICT_TOO_LONG: how long the packet may be */
	__u16 is_ping;		/* of ICMP: a boolean, VERDICT_PING_ANSWERED; the verifier forgets it here */
};
SIZE(struct onward, 304);

/* The packet that an ICMP error quotes: its tuple and the offsets of its headers. */
struct quote {
	struct tuple tuple;
	__u32 ip;
	__u32 transport;
};
SIZE(struct quote, 48);

/* An ICMP error about a translated packet (path/icmp_error.h). */
struct related {
	struct quote quote;
	struct tuple reply_tuple;	/* of the quoted packet's reply, whose entry applies */
	struct tuple quoted;		/* what the quoted packet's tuple becomes */
};
SIZE(struct related, 128);

/* A flow that is being opened: the selected backend, the new entries, and the search for a port. */
struct opening {
	struct selection selection;
	struct flow request_entry;	/* FLOW_DNAT or FLOW_DIRECT */
	struct flow reply_entry;	/* FLOW_UN_DNAT or FLOW_UN_DIRECT; at egress FLOW_UN_SNAT */
	struct flow snat_entry;	/* FLOW_SNAT_PENDING; at egress FLOW_SNAT */
	struct tuple reply_tuple;
	struct tuple snat_tuple;
	struct flow other;	/* a copy of an entry of another flow */
	struct tuple former_request_tuple;	/* of the flow that has reply_tuple already */
	struct address source;	/* of the masqueraded flow */
	struct tuple claim;	/* of the port that reply_tuple is about to take over */
	struct ending ending;	/* of the flow that has that port, or the place */
	__u64 holder_created;	/* of the flow that has a port: when its reply's entry was created */
	__u64 holder_connection;	/* what that entry has as its number in connections */
	__u64 oldest;		/* when that flow was last used */
	__u64 oldest_created;	/* its holder_created */
	__be16 oldest_port;
	__u16 pad[3];
	struct port_sequence ports;	/* of the masqueraded flow */
};
SIZE(struct opening, 824);

/*
 * The data that is too large for a program's stack. Each part is passed as an argument to the
 * functions that read or write it. The verifier does not track values in a map, so all paths that
 * have read a packet merge into one.
 */
struct scratch {
	struct packet packet;
	struct onward onward;
	struct opening opening;
	struct related related;
};
SIZE(struct scratch, 1344);

/* How many more packets may be refused with a reply until the budget is refilled. */
struct reject_budget {
	__u64 refilled;		/* nanoseconds of CLOCK_MONOTONIC */
	__u64 left;
};
SIZE(struct reject_budget, 16);

#endif
