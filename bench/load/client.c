/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A client that costs next to nothing itself, so that a rate is the way's. It takes commands, a
 * line each, and answers each with a line of nanoseconds: all of it, then for "connect" each
 * connect() alone.
 *
 *   connect ADDRESS PORT COUNT    so many connections, a byte each way, closed by a reset
 *   converse ADDRESS PORT COUNT   so many bytes there and back over one connection
 *   volley ADDRESS PORT COUNT     so many bursts of datagrams of one flow, all answered
 *   open ADDRESS PORT COUNT       a datagram each from so many sockets, never answered
 */
#include "common.h"
#include <sys/time.h>
#include <time.h>

#define BURST 16
#define MOST 100000	/* connections a command */

static long took[MOST];

static long now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000L + time.tv_nsec;
}

/* Nothing waits for ever; a stream is closed by a reset, so that no port is left in TIME_WAIT. */
static int opened(int kind)
{
	int made = must(socket(AF_INET, kind, 0), "socket");
	struct linger reset = { .l_onoff = 1 };
	struct timeval timeout = { .tv_sec = 5 };

	setsockopt(made, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
	setsockopt(made, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout));
	setsockopt(made, SOL_SOCKET, SO_SNDTIMEO, &timeout, sizeof(timeout));
	return made;
}

static void ask(int client)
{
	must(send(client, "?", 1, 0), "send");
}

static void hear(int client)
{
	char reply;

	must(recv(client, &reply, 1, 0) - 1, "recv");
}

static void reach(int client, const struct sockaddr_in *where)
{
	must(connect(client, (const struct sockaddr *)where, sizeof(*where)), "connect");
}

static void connections(const struct sockaddr_in *where, int count)
{
	for (int i = 0; i < count; i++) {
		int client = opened(SOCK_STREAM);
		long begun = now();

		reach(client, where);
		took[i] = now() - begun;
		ask(client);
		hear(client);
		close(client);
	}
}

static void converse(const struct sockaddr_in *where, int count)
{
	int client = opened(SOCK_STREAM);

	reach(client, where);
	for (int i = 0; i < count; i++) {
		ask(client);
		hear(client);
	}
	close(client);
}

static void volley(const struct sockaddr_in *where, int count)
{
	int client = opened(SOCK_DGRAM);

	reach(client, where);
	for (int i = 0; i < count; i++) {
		for (int j = 0; j < BURST; j++)
			ask(client);
		for (int j = 0; j < BURST; j++)
			hear(client);
	}
	close(client);
}

static void open_flows(const struct sockaddr_in *where, int count)
{
	char silent = SILENT;

	for (int i = 0; i < count; i++) {
		int client = opened(SOCK_DGRAM);

		reach(client, where);
		must(send(client, &silent, 1, 0), "send");
		close(client);
	}
}

static void run(const char *command, const struct sockaddr_in *where, int count)
{
	long begun = now();

	if (!strcmp(command, "connect"))
		connections(where, count);
	else if (!strcmp(command, "converse"))
		converse(where, count);
	else if (!strcmp(command, "volley"))
		volley(where, count);
	else
		open_flows(where, count);
	printf("%ld", now() - begun);
	for (int i = 0; i < count && !strcmp(command, "connect"); i++)
		printf(" %ld", took[i]);
	printf("\n");
	fflush(stdout);
}

int main(void)
{
	struct sockaddr_in where = { .sin_family = AF_INET };
	char command[16], address[16];
	int port, count;

	sit();
	while (scanf("%15s %15s %d %d", command, address, &port, &count) == 4) {
		where.sin_port = htons(port);
		if (count > MOST || inet_pton(AF_INET, address, &where.sin_addr) != 1)
			errx(1, "%s %s: no such address, or too many", command, address);
		run(command, &where, count);
	}
}
