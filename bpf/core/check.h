/* SPDX-License-Identifier: GPL-2.0 */
/*
 * A map's element may be given to another key while a program reads it: the LRU evicts it, or it is
 * deleted or replaced, and the kernel fills it anew at once. There are no barriers between its writes
 * and our reads (BPF has none before 6.15), so on arm64 what is read may be any mixture of both
 * contents, in whatever order it is read. Therefore a value contains a check, a sum over its key and
 * all of the value that precedes the check. A program copies the value, once, and believes the copy
 * if its check is that of the key which was looked up: a mixture passes in one of 2^32 cases. No
 * order of reads or writes is needed for that.
 *
 * What follows the check is changed in place and not in it. If it is read wrong, the element is no
 * longer its key's; so that matters only where something else is done by it: another key's element
 * is translated by it, written or deleted. For these only checked values are used.
 */
#ifndef EBPFLB_CORE_CHECK_H
#define EBPFLB_CORE_CHECK_H

#include "maps.h"

/* Words are read of structs whose fields were written: the compiler must see that they overlap. */
typedef __u32 __attribute__((may_alias)) word;

static __always_inline __u64 check_factor(int index)
{
	__u64 factor = CHECK_FACTOR;

	UNROLL
	for (int i = 1; i < CHECK_FIRST + index; i++)
		factor *= CHECK_FACTOR;
	return factor;
}

/* The sum of so many bytes, of which the first word has this index. */
static __always_inline __u64 check_sum(const void *start, int size, int first)
{
	const word *words = start;
	__u64 factor = check_factor(first), sum = 0;

	UNROLL
	for (int i = 0; i < size / 4; i++, factor *= CHECK_FACTOR)
		sum += words[i] * factor;
	return sum;
}

/* The upper half of a sum: each bit of a word changes it (multiply-shift hashing). */
static __always_inline __u32 check_of(__u64 sum)
{
	return sum >> 32;
}

/* Of a key, and of a value that has a check. */
#define CHECK_SUM(key, value) \
	(check_sum(key, sizeof(*(key)), 0) + \
	 check_sum(value, __builtin_offsetof(__typeof__(*(value)), check), \
		   sizeof(*(key)) / 4))

#define ALIGNED __attribute__((aligned(8)))	/* a copy on the stack */

/*
 * Copies a value, which is read once; whether the copy is one of this key. By eight bytes at a time:
 * of what is written in smaller pieces the verifier does not see that it replaces what was there, and
 * follows what comes after it once for each of the contents before. So copies begin at a multiple of
 * eight, as the values of maps do.
 */
#define COPY_CHECKED(copy, key, value) \
	({ \
		__builtin_memcpy(__builtin_assume_aligned(copy, 8), \
				 __builtin_assume_aligned(value, 8), sizeof(*(copy))); \
		barrier(); /* the copy is read from here on, not the element */ \
		(copy)->check == check_of(CHECK_SUM(key, copy)); \
	})

#endif
