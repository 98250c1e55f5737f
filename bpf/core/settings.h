/* SPDX-License-Identifier: GPL-2.0 */
/* The settings of this node, working memory of this CPU, and which network namespace is the node's own. */
#ifndef EBPFLB_CORE_SETTINGS_H
#define EBPFLB_CORE_SETTINGS_H

#include "maps.h"

#define SECOND 1000000000ULL	/* ns */
#define NO_NETNS 0	/* for packets: they belong to no socket here */

static __always_inline struct settings *settings_read(void)
{
	return ONLY_VALUE(struct settings, settings);
}

/* Without a cookie from the agent, the node's own namespace is the initial one. */
static __always_inline bool netns_is_host(__u64 netns)
{
	__u64 host = settings_read()->host_netns;

	return netns == (host ? host : get_netns_cookie(NULL));
}

/* Whether decisions are only counted (--shadow). */
static __always_inline bool is_shadow(void)
{
	return settings_read()->flags & SETTING_SHADOW;
}

/* Whether sockets of this namespace are translated (--socket-translation). */
static __always_inline bool netns_is_translated(__u64 netns)
{
	return !(settings_read()->flags & SETTING_HOST_SOCKETS) || netns_is_host(netns);
}

#endif
