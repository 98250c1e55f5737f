/* SPDX-License-Identifier: GPL-2.0 */
/*
 * The kernel may give a map's element to another key while a program reads it: the LRU evicts it,
 * or it is deleted or replaced, and the kernel fills it again at once. There are no barriers
 * between the kernel's writes and the program's reads (BPF has none before 6.15), so on arm64 a
 * program may read any mixture of both contents, in whatever order it reads. Therefore a value
 * contains a check, a sum over its key and all of the value that precedes the check. A program
 * copies the value once, and trusts the copy if its check matches the key that was looked up: one
 * mixture in 2^32 passes. This needs no order of reads or writes.
 *
 * The fields after the check change in place, or only save time, and are not part of the sum. A wrong
 * value in them means that the element no longer belongs to its key. This matters only where a program
 * uses them to translate, write or delete another key's element: there it uses checked values only.
 */
#ifndef EBPFLB_CORE_CHECK_H
#define EBPFLB_CORE_CHECK_H

#include "maps.h"

/* Reads structs as words: the compiler must know that a word may alias the fields. */
typedef __u32 __attribute__((may_alias)) word;

static __always_inline __u64 check_factor(int index)
{
	__u64 factor = CHECK_FACTOR;

	UNROLL
	for (int i = 1; i < CHECK_FIRST + index; i++)
		factor *= CHECK_FACTOR;
	return factor;
}

/*
 * Returns the sum over `size` bytes whose first word has the index `first`. OPAQUE makes clang add word by
 * word: otherwise it multiplies many words first, and keeps the products on the stack.
 */
static __always_inline __u64 check_sum(const void *start, int size, int first)
{
	const word *words = start;
	__u64 factor = check_factor(first), sum = 0;

	UNROLL
	for (int i = 0; i < size / 4; i++, factor *= CHECK_FACTOR) {
		sum += words[i] * factor;
		OPAQUE(sum);
	}
	return sum;
}

/* Returns the upper half of a sum: each bit of a word changes it (multiply-shift hashing). */
static __always_inline __u32 check_of(__u64 sum)
{
	return sum >> 32;
}

/* The sum of a key, and of a value that has a check. */
#define CHECK_SUM(key, value) \
	(check_sum(key, sizeof(*(key)), 0) + \
	 check_sum(value, __builtin_offsetof(__typeof__(*(value)), check), \
		   sizeof(*(key)) / 4))

#define ALIGNED __attribute__((aligned(8)))	/* a copy on the stack */

/*
 * Copies a value, reading it once, and returns whether the copy belongs to this key. It copies
 * eight bytes at a time: with smaller writes the verifier does not see that they replace the old
 * contents, and follows the code after them once for each old content. So copies start at a
 * multiple of eight, like the values of maps.
 */
#define COPY_CHECKED(copy, key, value) \
	({ \
		__builtin_memcpy(__builtin_assume_aligned(copy, 8), \
				 __builtin_assume_aligned(value, 8), sizeof(*(copy))); \
		barrier(); /* the copy is read from here on, not the element */ \
		(copy)->check == check_of(CHECK_SUM(key, copy)); \
	})

#endif
