/* SPDX-License-Identifier: Apache-2.0 */
/*
 *   stream DEVICE   sends frames by this device, past its queue. A line "COUNT HEX" is a frame, sent
 *                   so many times; the answer is a line of nanoseconds.
 *
 * Where the device leads into a namespace of this machine, the kernel does on this core what the
 * frame's receivers have to do, before the next one is sent: the core is always busy, and a frame
 * takes what sender and receivers together take.
 */
#include "common.h"
#include <errno.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <net/if.h>
#include <sys/uio.h>
#include <time.h>

#define BATCH 64

static long now(void)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC, &time);
	return time.tv_sec * 1000000000L + time.tv_nsec;
}

static int opened(const char *device)
{
	struct sockaddr_ll at = { .sll_family = AF_PACKET,
				  .sll_ifindex = must(if_nametoindex(device) ?: -1, device) };
	int made = must(socket(AF_PACKET, SOCK_RAW, 0), "socket"), yes = 1;

	must(bind(made, (struct sockaddr *)&at, sizeof(at)), "bind");
	must(setsockopt(made, SOL_PACKET, PACKET_QDISC_BYPASS, &yes, sizeof(yes)), "bypass");
	return made;
}

static int frame_of(const char *hex, unsigned char *frame, int most)
{
	int size = 0;

	while (size < most && sscanf(hex + 2 * size, "%2hhx", &frame[size]) == 1)
		size++;
	return size;
}

static void send_often(int sender, unsigned char *frame, int size, int count)
{
	struct iovec data = { .iov_base = frame, .iov_len = size };
	struct mmsghdr messages[BATCH] = {};
	int sent = 0, done;

	for (int i = 0; i < BATCH; i++)
		messages[i].msg_hdr = (struct msghdr){ .msg_iov = &data, .msg_iovlen = 1 };
	while (sent < count) {
		done = sendmmsg(sender, messages, count - sent < BATCH ? count - sent : BATCH, 0);
		if (done < 0 && errno != ENOBUFS)
			err(1, "sendmmsg");
		sent += done < 0 ? 1 : done;
	}
}

int main(int words, char **word)
{
	unsigned char frame[512];
	char hex[2 * sizeof(frame) + 1];
	int count, size, sender;
	long begun;

	if (words != 2)
		errx(2, "DEVICE");
	sit();
	sender = opened(word[1]);
	while (scanf("%d %1024s", &count, hex) == 2) {
		size = frame_of(hex, frame, sizeof(frame));
		begun = now();
		send_often(sender, frame, size, count);
		printf("%ld\n", now() - begun);
		fflush(stdout);
	}
}
