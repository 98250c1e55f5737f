/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The maps: name, kind, key, value, entries, flags. Python reads these lines too.
 *
 * RDONLY_PROG (5.2): only the agent writes. MMAPABLE (5.5): the agent writes without a call; the
 * kernel does not map RDONLY_PROG writable.
 *
 * CPU_ARRAYS is an ARRAY with so many entries for each CPU, those of one CPU after those of the
 * last. Of a PERCPU_ARRAY the kernel allocates each element by itself: 131,072 take 0.1 s. It has at
 * most COUNTER_PARTS parts: hypervisors announce up to 240 CPUs, most of which never come.
 */
#ifndef EBPFLB_MAPS_H
#define EBPFLB_MAPS_H

#include "compat.h"
#include "layout.h"

#define COUNTER_PARTS 32

#include "maps/persistent.h"
#include "maps/per_version.h"

#endif
