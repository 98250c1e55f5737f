/* SPDX-License-Identifier: GPL-2.0 */
/* Whether the flow tables may hold any flow; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_GATE_H
#define EBPFLB_LAYOUT_GATE_H

/*
 * `opened` grows before a program writes a flow's first entry, `written` before the agent writes one.
 * Where `empty` is greater by one than both together, the agent has found no flow since then, and
 * packets are not looked up.
 */
struct flow_gate {
	__u64 opened;
	__u64 written;
	__u64 empty;
};
SIZE(struct flow_gate, 24);

#endif
