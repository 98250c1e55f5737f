/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Rejects a call in a socket hook (kube-proxy.md 6.1). By default the errno is EPERM, after which
 * clients retry for ever, so another one is set (bpf_set_retval, 5.18). On older kernels a stream
 * socket is connected to port 0 of its own loopback, where no process can listen. Datagrams cannot
 * be sent to port 0 (EINVAL): they go to port tcpmux, where no process listens. An unconnected socket
 * then gets no error, like with kube-proxy's REJECT.
 *
 * The node's own call whose packets would be dropped is denied here, with the errno to which
 * kube-proxy's DROP leads: a connect() times out, but immediately; a datagram is not permitted. On
 * older kernels such a connect() is refused.
 */
#ifndef EBPFLB_SOCKETS_REJECT_H
#define EBPFLB_SOCKETS_REJECT_H

#include "compat.h"
#include "core/counters.h"
#include "layout.h"
#include "net/address.h"
#include "net/header.h"
#include "rules/frontend.h"

#define EPERM 1
#define EADDRINUSE 98
#define ETIMEDOUT 110
#define ECONNREFUSED 111
#define PORT_ZERO BE16(0)
#define TCPMUX BE16(1)

/* The answer of a hook to its socket's call. */
enum answer { DENY, LEAVE, REWRITE };

#ifdef HAVE_SET_RETVAL
#define NAMES_ERRNO true

static __always_inline enum answer reject_connection(const struct frontend *frontend,
						     struct backend *target)
{
	set_retval(-ECONNREFUSED);
	return DENY;
}

static __always_inline enum answer drop_connection(const struct frontend *frontend,
						   struct backend *target)
{
	set_retval(frontend->protocol == TCP ? -ETIMEDOUT : -EPERM);
	return DENY;
}

static __always_inline enum answer reject_bind(void)
{
	set_retval(-EADDRINUSE);
	return DENY;
}

#else
#define NAMES_ERRNO false

static __always_inline enum answer reject_connection(const struct frontend *frontend,
						     struct backend *target)
{
	target->address = address_loopback(&frontend->address);
	target->port = frontend->protocol == TCP ? PORT_ZERO : TCPMUX;
	return REWRITE;
}

static __always_inline enum answer drop_connection(const struct frontend *frontend,
						   struct backend *target)
{
	return frontend->protocol == TCP ? reject_connection(frontend, target) : DENY;
}

static __always_inline enum answer reject_bind(void)
{
	return LEAVE;
}

#endif

/*
 * bind() to a NodePort in the node's own namespace fails, unless the operator switched that off:
 * traffic from outside goes to the service, and the process would never see it.
 */

static __always_inline bool bind_is_guarded(__u64 netns)
{
	return settings_read()->flags & SETTING_GUARD_NODEPORTS && netns_is_host(netns);
}

static __always_inline bool frontend_exists(const struct frontend *frontend)
{
	return LOOKUP(struct service, services, frontend) != NULL;
}

/* A NodePort has one number in both families. */
static __always_inline bool bind_is_to_nodeport(const struct frontend *local, bool takes_v4)
{
	struct frontend nodeport = nodeport_of(local);
	bool exists = frontend_exists(&nodeport);

	nodeport.address = address_from_v4(0);
	return exists || (takes_v4 && address_is_any(&local->address) && frontend_exists(&nodeport));
}

/* takes_v4: of a socket of IPv6 that is bound to :: */
static __always_inline enum answer bind_answer(const struct frontend *local, __u64 netns,
					       bool takes_v4)
{
	if (!bind_is_guarded(netns) || !bind_is_to_nodeport(local, takes_v4))
		return LEAVE;
	if (!address_is_any(&local->address) && !node_serves(&local->address, netns))
		return LEAVE;
	if (!NAMES_ERRNO) /* EPERM would not tell why, so it is allowed */
		return LEAVE;
	verdict_count(VERDICT_NODEPORT_BIND_DENIED);
	return is_shadow() ? LEAVE : reject_bind();
}

#endif
