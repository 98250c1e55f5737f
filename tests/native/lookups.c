/* SPDX-License-Identifier: GPL-2.0 */
/* Look-ups of bpf/rules/, and what flows note, as functions that Python can call, beside the hooks. */
#include "hooks/socket.c"
#include "hooks/socket_opening.c"
#include "engine/flows/follow.h"
#include "engine/netfilter/choose.h"
#include "sockets/quiet.h"

int lookup_service(const void *frontend, __u64 netns, void *service)
{
	__u32 place;

	return service_find(frontend, netns, service, &place) == FOUND;
}

int may_exist(const void *frontend)
{
	return frontend_may_exist(frontend);
}

/* A packet of a known flow passes; false if there is none, or the entry is another's. */
int pass_packet(const void *packet)
{
	const struct tuple *tuple = &((const struct packet *)packet)->tuple;
	struct flow *flow = flow_find(tuple), known;

	if (!flow || !flow_copy(&known, tuple, flow))
		return false;
	flow_follow(packet, &known, flow);
	return true;
}

/* The same of a packet that may open another flow: then false. `to` is the tuple that it gets. */
int follow_packet(const void *packet, void *to)
{
	const struct tuple *tuple = &((const struct packet *)packet)->tuple;
	struct flow *flow = flow_find(tuple), known;

	if (!flow || !flow_copy(&known, tuple, flow) || !flow_continues(packet, &known, flow))
		return false;
	*(struct tuple *)to = flow_follow(packet, &known, flow);
	return true;
}

/* What a packet got, and what a later one gets by it: -1 if that is not known. */
void remember_choice(const void *tuple, __u32 service, __u32 chosen)
{
	struct __sk_buff ctx = { .priority = chosen };

	choice_remember(&ctx, tuple, settings_read(), service);
}

long long repeat_choice(const void *tuple)
{
	struct __sk_buff ctx = {};

	return choice_repeats(&ctx, tuple, settings_read()) ? (long long)ctx.priority : -1;
}

/* Whether the copy of an entry is one of this tuple. */
int copy_entry(const void *tuple, const void *entry, void *copy)
{
	return flow_copy(copy, tuple, entry);
}

int copy_service(const void *frontend, const void *value, void *copy)
{
	return COPY_CHECKED((struct service *)copy, (const struct frontend *)frontend,
			    (const struct service *)value);
}

int copy_backend(const void *slot, const void *value, void *copy)
{
	return COPY_CHECKED((struct backend *)copy, (const __u32 *)slot,
			    (const struct backend *)value);
}

/* An entry is given to two tuples in turns, whatever is read meanwhile. */
void write_in_turns(void *entry, const void *one, const void *other, __u32 size, __u32 rounds)
{
	for (__u32 round = 0; round < rounds; round++) {
		memcpy(entry, round % 2 ? one : other, size);
		barrier();
	}
}

/*
 * How often the entry that is written was the tuple's; -1 if a copy was believed that translates
 * otherwise.
 */
int read_often(const void *tuple, const void *entry, const void *right, void *wrong, __u32 rounds)
{
	int seen = 0;

	for (__u32 round = 0; round < rounds; round++) {
		if (!flow_copy(wrong, tuple, entry))
			continue;
		if (memcmp(wrong, right, offsetof(struct flow, check)))
			return -1;
		seen++;
	}
	return seen;
}

/* Whether a socket with these numbers of its struct tcp_sock is to be ended now. */
int look_at(void *socket, const void *numbers, __u64 time)
{
	return quiet_look(socket, numbers, time);
}
