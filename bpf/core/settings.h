/* SPDX-License-Identifier: GPL-2.0 */
/* The settings of this node, working memory of this CPU, and which network namespace is the node's own. */
#ifndef EBPFLB_CORE_SETTINGS_H
#define EBPFLB_CORE_SETTINGS_H

#include "maps.h"

#define SECOND 1000000000ULL	/* ns */
#define NO_NETNS 0	/* for packets: they belong to no socket here */

static __always_inline struct settings *settings_read(void)
{
	return LOOKUP_NUMBER(struct settings, settings, 0);
}

static __always_inline struct scratch *scratch_here(void)
{
	return LOOKUP_NUMBER(struct scratch, scratch, 0);
}

/* The same with an empty packet; of an assignment of it clang makes three times as many stores. */
static __always_inline struct scratch *scratch_begin(const enum hook hook)
{
	struct scratch *scratch = scratch_here();

	if (scratch) {
		__u64 *words = (__u64 *)&scratch->packet;

		UNROLL
		for (__u32 i = 0; i < sizeof(scratch->packet) / sizeof(*words); i++)
			words[i] = 0;
		scratch->packet.tuple.hook = hook;
		scratch->device = 0;
		scratch->mtu = 0;
	}
	return scratch;
}

/* Without a cookie from the agent, the node's own namespace is the initial one. */
static __always_inline bool netns_is_host(__u64 netns)
{
	struct settings *settings = settings_read();

	if (!settings)
		return false;
	if (!settings->host_netns)
		return netns == get_netns_cookie(NULL);
	return netns == settings->host_netns;
}

/* Whether decisions are only counted (--shadow). */
static __always_inline bool is_shadow(void)
{
	struct settings *settings = settings_read();

	return settings && settings->flags & SETTING_SHADOW;
}

/* Whether sockets of this namespace are translated (--socket-translation). */
static __always_inline bool netns_is_translated(__u64 netns)
{
	struct settings *settings = settings_read();

	return !(settings && settings->flags & SETTING_HOST_SOCKETS) || netns_is_host(netns);
}

#endif
