/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A packet's way in, from top to bottom: its flow; or else the service that it asks for, whether
 * it may, a backend, and a flow opened. At ingress destinations are rewritten.
 *
 * What belongs to no flow and opens none is left alone: it may be of a connection that was there
 * before us, which conntrack knows.
 */
#ifndef EBPFLB_PATH_INGRESS_H
#define EBPFLB_PATH_INGRESS_H

#include "path/client.h"
#include "path/direct.h"
#include "path/select.h"
#include "path/flow_close.h"

static __always_inline struct scratch *arrival_here(void)
{
	__u32 only = 0;

	return LOOKUP(struct scratch, scratch, &only);
}

static __always_inline enum verdict arrive_at(const struct packet *packet,
					      const struct asker *asker,
					      struct scratch *arrival)
{
	const struct service *service = &arrival->service;
	struct affinity_key client = { .address = asker->address, .service = service->id };
	bool confined = policy_confines(service, asker->pod);
	__u32 draw = tuple_draw(&packet->tuple);

	if (!policy_admits(service, &asker->address))
		return VERDICT_SOURCE_DENIED;
	return choose_backend(&client, service, confined, draw, &arrival->backend);
}

static __always_inline enum verdict arrive_once(struct __sk_buff *ctx,
						const struct packet *packet,
						const struct settings *settings,
						struct asker *asker, struct scratch *arrival)
{
	struct frontend to = frontend_asked(&packet->tuple);
	enum found found = service_find(&to, NO_NETNS, &arrival->service);

	if (found == ABSENT)
		return policy_unserved(&to.address);
	if (found == RECYCLED)
		return VERDICT_RECYCLED;
	asker->pod = asker_is_pod(ctx, settings, &asker->address);
	return arrive_at(packet, asker, arrival);
}

/* What changed hands while we looked is asked for again, once; written out: see serve.h. */
static __always_inline enum verdict arrive_choose(struct __sk_buff *ctx,
						  const struct packet *packet,
						  const struct settings *settings,
						  struct asker *asker, struct scratch *arrival)
{
	enum verdict verdict = arrive_once(ctx, packet, settings, asker, arrival);

	if (verdict != VERDICT_RECYCLED)
		return verdict;
	verdict_count(VERDICT_RETRIED);
	return arrive_once(ctx, packet, settings, asker, arrival);
}

/* A datagram that finds no room for its flow goes on alone; its answer will not be translated. */
static __always_inline enum verdict arrive_stateless(const struct packet *packet,
						     const struct backend *backend,
						     struct tuple *to)
{
	verdict_count(VERDICT_FLOWS_FULL);
	*to = packet->tuple;
	to->destination = backend->address;
	to->destination_port = backend->port;
	return VERDICT_TRANSLATED;
}

static __always_inline enum verdict arrive_open(struct __sk_buff *ctx,
						const struct packet *packet,
						const struct settings *settings,
						const struct asker *asker,
						struct scratch *arrival, struct tuple *to)
{
	const struct backend *backend = &arrival->backend;
	bool masquerade = asker_is_hidden(ctx, packet, settings, asker, arrival);
	enum verdict verdict;

	verdict = flow_open(settings, &packet->tuple, ctx->ifindex, masquerade, arrival);
	if (verdict == VERDICT_FLOWS_FULL && packet->tuple.protocol != TCP && !masquerade)
		return arrive_stateless(packet, backend, to);
	if (verdict == VERDICT_FLOWS_FULL || verdict == VERDICT_PORTS_EXHAUSTED)
		return verdict;
	*to = flow_translate(&packet->tuple, &arrival->flow);
	return verdict;
}

static __always_inline enum verdict arrive_anew(struct __sk_buff *ctx,
						const struct packet *packet, struct tuple *to)
{
	struct settings *settings = settings_read();
	struct scratch *arrival = arrival_here();
	struct asker asker = { .address = packet->tuple.source };
	enum verdict verdict;

	if (!settings || !arrival)
		return VERDICT_PASSED;
	verdict = arrive_choose(ctx, packet, settings, &asker, arrival);
	if (verdict == VERDICT_PASSED)
		return arrive_beside(packet, settings, ctx->ifindex, arrival, to);
	if (verdict != VERDICT_TRANSLATED)
		return verdict;
	return arrive_open(ctx, packet, settings, &asker, arrival, to);
}

/* Decides about a packet; one that is to be rewritten becomes to. */
static __always_inline enum verdict arrive(struct __sk_buff *ctx, const struct packet *packet,
					   struct tuple *to)
{
	struct flow *flow = flow_find(&packet->tuple);

	if (flow && beside_elsewhere(flow, ctx->ifindex))
		return VERDICT_PASSED;
	if (flow && flow_goes_on(packet, flow)) {
		follow(packet, flow, to);
		return VERDICT_ESTABLISHED;
	}
	if (!packet->opens)
		return VERDICT_PASSED;
	if (flow)
		flow_close(&packet->tuple, flow);
	return arrive_anew(ctx, packet, to);
}

#endif
