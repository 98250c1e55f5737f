/* SPDX-License-Identifier: GPL-2.0 */
/*
 * An event of the monitoring variant (-DMONITOR), which runs while `ebpflb monitor` does. Without
 * -DMONITOR the macros monitor_* compile to their last argument only.
 */
#ifndef EBPFLB_RECORD_EVENT_H
#define EBPFLB_RECORD_EVENT_H

#ifdef MONITOR

#include "record/events.h"

/*
 * The reader polls the ring often enough: waking it for each event would cost more than all
 * else.
 */
#define NO_WAKEUP 1	/* BPF_RB_NO_WAKEUP */

static void *(*const ring_reserve)(void *ring, __u64 size, __u64 flags) = (void *)131;
static void (*const ring_submit)(void *event, __u64 flags) = (void *)132;
#ifdef HAVE_PROCESS
static __u64 (*const current_pid_tgid)(void) = (void *)14;
static long (*const current_comm)(void *name, __u32 size) = (void *)16;
#endif

static __always_inline void event_lost(void)
{
	__u64 *lost = LOOKUP_NUMBER(__u64, events_lost, 0);

	if (lost)
		*lost += 1;
}

/* Before 6.1 programs at cgroups have no helpers that name the process. */
static __always_inline void event_process(struct event *event)
{
#ifdef HAVE_PROCESS
	event->process = current_pid_tgid() >> 32;
	current_comm(event->comm, sizeof(event->comm));
#endif
}

static __always_inline struct monitor *monitor_read(void)
{
	return LOOKUP_NUMBER(struct monitor, monitor, 0);
}

static __always_inline bool event_is_wanted(const struct monitor *monitor, enum verdict verdict)
{
	return monitor->verdicts >> verdict & 1;
}

/*
 * Reserves memory for an event. Check it for NULL in one place only: the verifier of 5.10 follows
 * both ways of a second check, and on one of them the event is never submitted.
 */
static __always_inline struct event *event_reserve(void)
{
	return ring_reserve(MAP(events), sizeof(struct event), 0);
}

/* Sets all fields except tuple, address and ids. */
static __always_inline void event_begin(struct event *event, const enum event_hook hook,
					enum verdict verdict, __u64 begun,
					const struct monitor *monitor)
{
	event->time = begun;
	event->netns = 0;
	event->process = 0;
	event->ifindex = 0;
	event->kind = 0;
	event->comm[0] = 0;
	event->verdict = verdict;
	event->hook = hook;
	if (hook < EVENT_INGRESS)
		event_process(event);
}

/* Submits the event; the time is taken last. */
static __always_inline void event_end(struct event *event)
{
	event->took = bpf_ktime_get_ns() - event->time;
	ring_submit(event, NO_WAKEUP);
}

#define monitor_time() bpf_ktime_get_ns()
#define monitor_begin(begun) __u64 begun = monitor_time()

#else

#define monitor_time() 0
#define monitor_begin(begun) ((void)0)

#endif
#endif
