/* SPDX-License-Identifier: Apache-2.0 */
/* What client and server share: both sit on the first CPU at real-time priority, and whatever
 * fails ends them with a word. */
#ifndef BENCH_LOAD_COMMON_H
#define BENCH_LOAD_COMMON_H

#define _GNU_SOURCE
#include <arpa/inet.h>
#include <err.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define SILENT '!'	/* a datagram that is not answered */

static int must(int result, const char *what)
{
	if (result < 0)
		err(1, "%s", what);
	return result;
}

/* Not allowed in a container: the p99 then includes other processes. */
static void sit(void)
{
	struct sched_param first = { .sched_priority = 1 };
	cpu_set_t all, one;
	int cpu = 0;

	CPU_ZERO(&one);
	must(sched_getaffinity(0, sizeof(all), &all), "sched_getaffinity");
	while (!CPU_ISSET(cpu, &all))
		cpu++;
	CPU_SET(cpu, &one);
	must(sched_setaffinity(0, sizeof(one), &one), "sched_setaffinity");
	sched_setscheduler(0, SCHED_FIFO, &first);
}

#endif
