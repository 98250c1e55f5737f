/* SPDX-License-Identifier: GPL-2.0 */
/*
 * How a hook says no. A plain "no" is EPERM, which clients retry for ever; so we name the errno
 * (bpf_set_retval, 5.18). Where the kernel cannot, the socket is sent to a place that refuses at
 * once: port 0 on its own loopback, where nobody can listen. Datagrams cannot be sent to port 0
 * (EINVAL) and go to tcpmux, which nobody serves; there an unconnected socket sees no error, as
 * with kube-proxy's REJECT.
 */
#ifndef EBPFLB_PATH_REJECT_SOCKET_H
#define EBPFLB_PATH_REJECT_SOCKET_H

#include "compat.h"
#include "layout.h"
#include "net/address.h"
#include "net/protocol.h"

#define EADDRINUSE 98
#define ECONNREFUSED 111
#define NOBODY BE16(0)
#define TCPMUX BE16(1)

/* What a hook does with its socket. */
enum answer { DENY, LEAVE, REWRITE };

#ifdef HAVE_SET_RETVAL

static __always_inline enum answer reject_connection(const struct frontend *to,
						     struct backend *place)
{
	set_retval(-ECONNREFUSED);
	return DENY;
}

static __always_inline enum answer reject_bind(void)
{
	set_retval(-EADDRINUSE);
	return DENY;
}

#else

static __always_inline enum answer reject_connection(const struct frontend *to,
						     struct backend *place)
{
	place->address = address_loopback(&to->address);
	place->port = to->protocol == TCP ? NOBODY : TCPMUX;
	return REWRITE;
}

/* EPERM would puzzle more than the bind would hurt. */
static __always_inline enum answer reject_bind(void)
{
	return LEAVE;
}

#endif
#endif
