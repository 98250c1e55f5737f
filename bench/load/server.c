/* SPDX-License-Identifier: Apache-2.0 */
/*
 *   server PORT   answers what it reads from TCP, and every datagram but the silent, with a byte;
 *                 says "ready"
 */
#include "common.h"

static void serve_stream(int listening)
{
	char data[64];

	for (;;) {
		int served = must(accept4(listening, NULL, NULL, 0), "accept");

		while (recv(served, data, sizeof(data), 0) > 0)
			send(served, "!", 1, MSG_NOSIGNAL);
		close(served);
	}
}

static void serve_datagrams(int bound)
{
	struct sockaddr_in peer;
	char data[64];

	for (;;) {
		socklen_t size = sizeof(peer);

		if (recvfrom(bound, data, sizeof(data), 0, (struct sockaddr *)&peer, &size) > 0 &&
		    data[0] != SILENT)
			sendto(bound, "!", 1, 0, (struct sockaddr *)&peer, size);
	}
}

static int bound(int kind, int port)
{
	struct sockaddr_in where = { .sin_family = AF_INET, .sin_port = htons(port) };
	int made = must(socket(AF_INET, kind, 0), "socket"), yes = 1;

	setsockopt(made, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
	must(bind(made, (struct sockaddr *)&where, sizeof(where)), "bind");
	return made;
}

/* Datagrams are served by a child; it is ended with our cgroup. */
int main(int count, char **words)
{
	if (count != 2)
		errx(2, "PORT");
	sit();
	int port = atoi(words[1]);
	int stream = bound(SOCK_STREAM, port), datagrams = bound(SOCK_DGRAM, port);

	must(listen(stream, 512), "listen");
	puts("ready");
	fflush(stdout);
	if (must(fork(), "fork"))
		serve_stream(stream);
	serve_datagrams(datagrams);
}
