/* SPDX-License-Identifier: GPL-2.0 */
/* The outcomes of a hook, and reasons; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_VERDICT_H
#define EBPFLB_LAYOUT_VERDICT_H

/* Every outcome has a name and a counter. */
enum verdict {
	VERDICT_PASSED = 0,	/* not to a frontend of ours: left alone */
	VERDICT_TRANSLATED = 1,	/* new connection or flow: sent to a backend */
	VERDICT_REFUSED = 2,	/* the service has no endpoint: connection refused */
	VERDICT_NO_LOCAL_ENDPOINT = 3,	/* policy Local and no endpoint on this node: dropped */
	VERDICT_RECYCLED = 4,	/* a map element was recycled during both look-ups, or a flow's: dropped */
	VERDICT_RETRIED = 5,	/* a map element was recycled while it was read: looked up again */
	VERDICT_REPLY_TRANSLATED = 6,	/* the application saw the frontend instead of the backend */
	VERDICT_NODEPORT_BIND_DENIED = 7,	/* bind() to a NodePort: address in use */
	VERDICT_ESTABLISHED = 8,	/* packet of a known flow: rewritten, or left to conntrack */
	VERDICT_RELATED = 9,	/* ICMP error about a known flow: rewritten */
	VERDICT_MASQUERADED = 10,	/* new flow that leaves with an address of this node */
	VERDICT_PORT_CHANGED = 11,	/* new flow whose client port was in use to this backend: changed */
	VERDICT_PORTS_EXHAUSTED = 12,	/* no source port to be had, or no address to masquerade with: dropped */
	VERDICT_FLOWS_FULL = 13,	/* no space for a flow: TCP and all of conntrack's dropped, others sent without */
	VERDICT_SOURCE_DENIED = 14,	/* client outside loadBalancerSourceRanges: dropped */
	VERDICT_UNALLOCATED = 15,	/* address in a service range that no service has: dropped */
	VERDICT_REJECT_LIMITED = 16,	/* refused without a reply: over the rate limit, or no reply is possible */
	VERDICT_MALFORMED = 17,	/* packet that is cut short or contradicts itself: left alone */
	VERDICT_PORT_TAKEN_OVER = 18,	/* new flow that leaves from the port of one not idle for its time yet */
	VERDICT_TOO_LONG = 19,	/* reply too long for its device: answered with "packet too big" */
	VERDICT_PASSED_THROUGH = 20,	/* no endpoint, and the service leaves such packets to the network */
	VERDICT_PING_ANSWERED = 21,	/* echo request to an address of a service: answered */
	VERDICT_UNKNOWN_PORT = 22,	/* port of a load balancer's address that no service has: dropped */
	VERDICT_REDIRECT = 23,	/* ICMP redirect about a packet of a known flow: dropped */
	VERDICT_TRANSLATED_AT_SOCKET = 24,	/* to an external frontend's address, by a socket hook: left alone */
	VERDICT_HANDED = 25,	/* to an endpoint on another node, by its MAC address (--hand-over) */
	VERDICTS = 26,		/* how many */
};

/* Why a flow is masqueraded. */
enum masquerade_reason {
	MASQUERADE_NONE = 0,	/* it is not */
	MASQUERADE_HAIRPIN = 1,	/* the client is the backend itself */
	MASQUERADE_ALL = 2,	/* --masquerade-all */
	MASQUERADE_NOT_POD = 3,	/* to a cluster IP, from a client that is no pod */
	MASQUERADE_LOCAL_CLIENT = 4,	/* a pod, to an external address */
	MASQUERADE_ELSEWHERE = 5,	/* an external client, and the backend is on another node */
	MASQUERADE_HERE = 6,	/* the same on this node, by option */
	MASQUERADE_ASYMMETRIC = 7,	/* replies would leave by another device */
};

#endif
