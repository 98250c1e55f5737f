/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The layouts that datapath and agent share: every key, value, flag and verdict.
 *
 * C includes this file and Python reads its parts through cffi, so they have plain declarations
 * only: no macro but SIZE, no expression but a number. Fields of packets are __be16 and __be32 in
 * network order; ids and indexes are in host order; padding is a field and always zero.
 */
#ifndef EBPFLB_LAYOUT_H
#define EBPFLB_LAYOUT_H

#define SIZE(type, bytes) _Static_assert(sizeof(type) == (bytes), "the size of " #type)

#include "layout/address.h"
#include "layout/check.h"
#include "layout/service.h"
#include "layout/affinity.h"
#include "layout/socket.h"
#include "layout/flow.h"
#include "layout/connection.h"
#include "layout/counters.h"
#include "layout/node.h"
#include "layout/service_place.h"
#include "layout/choice.h"
#include "layout/gate.h"
#include "layout/endpoint_health.h"
#include "layout/expired.h"
#include "layout/forwarded.h"
#include "layout/fragment.h"
#include "layout/quiet_socket.h"
#include "layout/scratch.h"
#include "layout/verdict.h"

#endif
