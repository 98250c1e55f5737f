/* SPDX-License-Identifier: GPL-2.0 */
/* Ranges of ports in the map services (rules/frontend.h); a part of layout.h. */
#ifndef EBPFLB_LAYOUT_PORT_RANGE_H
#define EBPFLB_LAYOUT_PORT_RANGE_H

/*
 * Two kinds of frontends have the bit IN_RANGE in their protocol:
 *
 *   port = the first one of a range   its value is the service, as for other frontends
 *   port 0                            its value lists the ranges of the address and protocol
 *
 * A list is a struct service with id 0. From affinity_seconds on it has a word for each range, with the
 * first port in the upper half and the last port in the lower; further words are 0.
 */
enum port_range {
	IN_RANGE = 64,
	MOST_RANGES = 8,
};

#endif
