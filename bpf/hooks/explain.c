/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Answers `ebpflb explain` with the socket hooks' decisions. Socket hooks do not support
 * BPF_PROG_TEST_RUN, so this program has a type that every kernel can test-run, and is never
 * attached. It reads the socket's question from the map `steps`, and writes its steps there.
 */
#define RECORD
#define EBPFLB_NO_SOCKET

#include "compat.h"
#include "maps.h"
#include "hooks/socket_calls.h"

static __always_inline struct steps *asked(void)
{
	return LOOKUP_NUMBER(struct steps, steps, 0);
}

/* Replaces the helper: netns_is_host asks it, without a socket, for the initial namespace. */
static __always_inline __u64 get_netns_cookie(void *ctx)
{
	struct steps *question = asked();

	return question ? question->initial_netns : 0;
}

static __always_inline __u64 get_socket_cookie(void *ctx)
{
	return 0;
}

static __always_inline int set_retval(int retval)
{
	record(STEP_ERRNO, -retval);
	return 0;
}

PROGRAM("tc/ingress")
int explain_connect(struct __sk_buff *ctx)
{
	struct steps *question = asked();
	struct backend backend = {};
	struct frontend frontend;
	struct request request = { .frontend = &frontend, .is_connected = true };
	enum answer answer;

	if (!question)
		return 0;
	frontend = question->frontend;
	frontend.protocol = socket_protocol(question->type, frontend.protocol);
	request.socket = question->socket;
	request.netns = question->netns;
	answer = socket_translate(&request, CONNECT, &backend);
	record_at(STEP_ANSWER, answer << 16 | backend.port, &backend.address);
	return answer;
}

LICENSE("GPL")
