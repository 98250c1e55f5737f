/* SPDX-License-Identifier: GPL-2.0 */
/* What came of it; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_VERDICT_H
#define EBPFLB_LAYOUT_VERDICT_H

/* Every outcome has a name and a counter. */
enum verdict {
	VERDICT_PASSED = 0,	/* no frontend of ours: left alone */
	VERDICT_TRANSLATED = 1,	/* sent to a backend */
	VERDICT_REFUSED = 2,	/* no endpoint anywhere: connection refused */
	VERDICT_NOT_HERE = 3,	/* endpoints, but none here, and the policy is Local: time-out */
	VERDICT_SLOT_LOST = 4,	/* what we read changed hands twice in a row: refused */
	VERDICT_SLOT_RETRIED = 5,	/* what we read changed hands once: looked up again */
	VERDICT_RESTORED = 6,	/* the backend's address was shown as the frontend's */
	VERDICT_PORT_TAKEN = 7,	/* bind() to a NodePort: address in use */
	VERDICT_FOLLOWED = 8,	/* packet of a known flow: rewritten */
	VERDICT_RELATED = 9,	/* ICMP error about a known flow: rewritten */
	VERDICT_MASQUERADED = 10,	/* flow that goes on as this node's */
	VERDICT_PORT_CHANGED = 11,	/* flow whose client's port was in use by another to this backend */
	VERDICT_CROWDED = 12,	/* flow for which no free source port, or no address, was found: dropped */
	VERDICT_FLOWS_FULL = 13,	/* no room for a flow: TCP dropped, others sent without state */
	VERDICT_FORBIDDEN = 14,	/* client outside loadBalancerSourceRanges: dropped */
	VERDICT_UNALLOCATED = 15,	/* address in a service range that no service has: dropped */
	VERDICT_MUTED = 16,	/* refused without an answer: too many lately, or a reset itself */
	VERDICT_UNREADABLE = 17,	/* packet that is cut short or malformed: left alone */
	VERDICTS = 18,		/* how many */
};

#endif
