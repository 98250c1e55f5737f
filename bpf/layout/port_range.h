/* SPDX-License-Identifier: GPL-2.0 */
/* Ranges of ports in the map services (rules/frontend.h); a part of layout.h. */
#ifndef EBPFLB_LAYOUT_PORT_RANGE_H
#define EBPFLB_LAYOUT_PORT_RANGE_H

/*
 * Frontends of ranges have the bit IN_RANGE in their protocol. A service's own has the first port of the
 * range. The one with port 0 lists all ranges of the address and protocol: a service with the id 0 that
 * has them in the place of affinity_seconds and what follows. A word is a range, the first port in its
 * upper half, the last in the lower; 0: none.
 */
enum port_range {
	IN_RANGE = 64,
	MOST_RANGES = 8,
};

#endif
