/* SPDX-License-Identifier: GPL-2.0 */
/* What packets need not be looked up in; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_GATE_H
#define EBPFLB_LAYOUT_GATE_H

/*
 * `opened` grows before a program writes a flow's first entry. Where `empty` is greater by one, the
 * agent has found no flow since then, and packets are not looked up.
 */
struct flow_gate {
	__u64 opened;
	__u64 empty;
	__u64 endpoint_health;	/* 1: attempts are noted (path/attempt.h) */
};
SIZE(struct flow_gate, 24);

#endif
