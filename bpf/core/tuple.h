/* SPDX-License-Identifier: GPL-2.0 */
/* Tuples of packets: the reply's, whether two are equal, and a number that spreads them evenly. */
#ifndef EBPFLB_CORE_TUPLE_H
#define EBPFLB_CORE_TUPLE_H

#include "maps.h"
#include "net/packet.h"

/* The reply to a packet, as the hook would see it. */
static __always_inline struct tuple tuple_reverse(const struct tuple *tuple, __u8 hook)
{
	return (struct tuple){ .source = tuple->destination,
			       .destination = tuple->source,
			       .source_port = tuple->destination_port,
			       .destination_port = tuple->source_port,
			       .protocol = tuple->protocol,
			       .hook = hook };
}

/* The same into memory of the caller, field by field: it needs no stack. */
static __always_inline void tuple_write_reverse(struct tuple *reverse, const struct tuple *tuple,
						__u8 hook)
{
	reverse->source = tuple->destination;
	reverse->destination = tuple->source;
	reverse->source_port = tuple->destination_port;
	reverse->destination_port = tuple->source_port;
	reverse->protocol = tuple->protocol;
	reverse->hook = hook;
	reverse->pad = 0;
}

/* The destination of a packet as a frontend, to be looked up. */
static __always_inline struct frontend tuple_frontend(const struct tuple *tuple)
{
	return (struct frontend){ .address = tuple->destination,
				  .port = tuple->destination_port,
				  .protocol = tuple->protocol };
}

/* What no client knows; it stays the same as long as flows are kept. */
static __always_inline __u64 secret_read(void)
{
	return *ONLY_VALUE(__u64, secret);
}

/*
 * Evenly spread over 32 bits, and always the same for a tuple: two packets of a new flow on two
 * CPUs get the same backend. A secret keeps a client from choosing its backend by its port.
 */
static __always_inline __u32 tuple_hash(const struct tuple *tuple, __u64 mixed)
{
	const __u32 *words = (const __u32 *)tuple;

	UNROLL
	for (int i = 0; i < (int)sizeof(*tuple) / 4; i++) {
		mixed = (mixed ^ words[i]) * 0x9e3779b97f4a7c15ULL;
		mixed ^= mixed >> 32;
	}
	return mixed;
}

static __always_inline __u64 mix_step(__u64 mixed, __u64 more)
{
	mixed = (mixed ^ more) * 0x9e3779b97f4a7c15ULL;
	mixed = (mixed ^ mixed >> 29) * 0xbf58476d1ce4e5b9ULL;
	return mixed ^ mixed >> 32;
}

/* 64 bits instead; with the secret, so that no client can compute them. */
static __always_inline __u64 tuple_mix(const struct tuple *tuple)
{
	const __u32 *from = tuple->source.word, *to = tuple->destination.word;
	__u64 mixed = secret_read();

	if (!address_is_v4(&tuple->source)) {
		mixed = mix_step(mixed, (__u64)from[0] << 32 | from[1]);
		mixed = mix_step(mixed, (__u64)from[2] << 32 | to[2]);
		mixed = mix_step(mixed, (__u64)to[0] << 32 | to[1]);
	}
	mixed = mix_step(mixed, (__u64)from[3] << 32 | to[3]);
	return mix_step(mixed, (__u64)tuple->source_port << 32 |
				       (__u64)tuple->destination_port << 16 | tuple->protocol);
}

/* 32 bits, evenly spread, that are always the same for a number. */
static __always_inline __u32 number_mix(__u64 number)
{
	number = (number ^ number >> 32) * 0x9e3779b97f4a7c15ULL;
	number = (number ^ number >> 29) * 0xbf58476d1ce4e5b9ULL;
	return number >> 32;
}

static __always_inline __u32 address_mix(const struct address *address)
{
	const __u32 *word = address->word;
	__u64 upper = (__u64)word[0] << 32 | word[1];

	return number_mix(upper * 0x94d049bb133111ebULL ^ ((__u64)word[2] << 32 | word[3]));
}

static __always_inline bool tuple_is_loop(const struct tuple *tuple)
{
	return tuple->source_port == tuple->destination_port &&
	       address_equal(&tuple->source, &tuple->destination);
}

#endif
