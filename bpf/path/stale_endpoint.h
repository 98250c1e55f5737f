/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A datagram that leaves for a UDP endpoint which was removed a moment ago. Conntrack still translates
 * its flow by an entry that ingress may know nothing of: one that a kube-proxy created, or one that is
 * older than our memory of the flow. The program reports the flow, and the agent deletes its entry
 * within a millisecond, however many entries conntrack has.
 *
 * The agent removes an endpoint from the map a second later. The number of reports is limited because
 * the endpoint may rightly get datagrams: through another Service, or by its own address.
 */
#ifndef EBPFLB_PATH_STALE_ENDPOINT_H
#define EBPFLB_PATH_STALE_ENDPOINT_H

#include "rules/frontend.h"

#ifdef RECORD

/* `ebpflb explain` moves no flow. */
static __always_inline void stale_datagram_report(struct tuple *tuple)
{
}

#else

static __always_inline void stale_datagram_report(struct tuple *tuple)
{
	struct frontend endpoint = tuple_frontend(tuple);
	__u32 *left = LOOKUP(__u32, stale_endpoints, &endpoint);
	__u32 reports = left ? *left : 0;

	if (!reports)
		return;
	*left = reports - 1;	/* another CPU may write the same: then one more is reported */
	bpf_ringbuf_output(MAP(moved_flows), tuple, sizeof(*tuple), 0);
}

#endif

#endif
