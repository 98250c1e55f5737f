/* SPDX-License-Identifier: GPL-2.0 */
/* The ports of fragmented datagrams; a part of layout.h. */
#ifndef EBPFLB_LAYOUT_FRAGMENT_H
#define EBPFLB_LAYOUT_FRAGMENT_H

/* The key that all fragments of one IP datagram have in common, at one hook. */
struct fragment_key {
	struct address source;
	struct address destination;
	__u32 id;
	__u8 protocol;
	__u8 hook;		/* enum hook */
	__u16 pad;
};
SIZE(struct fragment_key, 40);

/* The ports, which only the first fragment carries. */
struct fragment_ports {
	__u64 seen;		/* nanoseconds of CLOCK_MONOTONIC */
	__be16 source_port;
	__be16 destination_port;
	__u32 pad;
};
SIZE(struct fragment_ports, 16);

#endif
