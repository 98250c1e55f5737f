/* SPDX-License-Identifier: GPL-2.0 */
/* Events of calls on sockets. */
#ifndef EBPFLB_RECORD_EVENT_CALL_H
#define EBPFLB_RECORD_EVENT_CALL_H

#include "core/client.h"
#include "record/event.h"

#ifdef MONITOR

static __always_inline void event_call(const enum event_hook hook, const struct frontend *frontend,
				       __u64 netns, const struct backend *backend,
				       enum verdict verdict, __u64 begun)
{
	struct monitor *monitor = monitor_read();
	struct event *event;

	if (!monitor || !event_is_wanted(monitor, verdict))
		return;
	event = event_reserve();
	if (!event) {
		event_lost();
		return;
	}
	event_begin(event, hook, verdict, begun, monitor);
	event->netns = netns;
	event->tuple = (struct tuple){ .destination = frontend->address,
				       .destination_port = frontend->port,
				       .protocol = frontend->protocol };
	event->address = backend->address;
	event->port = backend->port;
	event->service = backend->service;
	event->backend = backend->id;
	event_end(event);
}

static __always_inline enum verdict event_request(const struct request *request, __u32 call,
						  const struct backend *backend,
						  enum verdict verdict)
{
	event_call(EVENT_CONNECT + call, request->frontend, request->netns, backend, verdict,
		   request->begun);
	return verdict;
}

static __always_inline struct peer_frontend *event_reply(struct bpf_sock_addr *ctx, __u32 call,
							 __u64 begun, struct peer_frontend *found)
{
	struct backend backend = {};

	if (!found)
		return found;
	backend.address = found->address;
	backend.port = found->port;
	backend.id = found->backend;
	event_call(EVENT_CONNECT + call, &found->frontend, get_netns_cookie(ctx), &backend,
		   VERDICT_REPLY_TRANSLATED, begun);
	return found;
}

static __always_inline bool event_bind(struct bpf_sock *ctx, const struct frontend *local,
				       __u64 begun, bool is_allowed)
{
	struct backend none = {};

	if (!is_allowed)
		event_call(EVENT_BIND, local, get_netns_cookie(ctx), &none,
			   VERDICT_NODEPORT_BIND_DENIED, begun);
	return is_allowed;
}

#define monitor_request(request, call, backend, verdict) \
	event_request(request, call, backend, verdict)
#define monitor_reply(ctx, call, begun, found) event_reply(ctx, call, begun, found)
#define monitor_bind(ctx, local, begun, is_allowed) event_bind(ctx, local, begun, is_allowed)

#else

#define monitor_request(request, call, backend, verdict) (verdict)
#define monitor_reply(ctx, call, begun, found) (found)
#define monitor_bind(ctx, local, begun, is_allowed) (is_allowed)

#endif
#endif
