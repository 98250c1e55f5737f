/* SPDX-License-Identifier: GPL-2.0 */
/* Copies of the entries of the map services (rules/frontend.h); a part of layout.h. */
#ifndef EBPFLB_LAYOUT_SERVICE_PLACE_H
#define EBPFLB_LAYOUT_SERVICE_PLACE_H

/* Two cache lines. */
struct service_place {
	struct frontend frontend;	/* without a protocol: the place is free */
	__u32 pad;
	struct service service;
	__u32 pad2[5];
};
SIZE(struct service_place, 128);

#endif
