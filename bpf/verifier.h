/* SPDX-License-Identifier: GPL-2.0 */
/* What is written down for the compiler's and the verifier's sake. */
#ifndef EBPFLB_VERIFIER_H
#define EBPFLB_VERIFIER_H

/* The compiler does not replace reads after it by values that were read before it. */
#define barrier() asm volatile("" ::: "memory")

/* The compiler assumes nothing about the variable's value from here on. */
#define OPAQUE(variable) asm volatile("" : "+r"(variable))

/*
 * From here on the verifier takes the variable's value for unknown: it follows what comes after it
 * once, and not once for each value that it knows of. `number` is one that it does not know.
 */
#define FORGET_VALUE(variable, number) ({ \
	__u64 one_ = (number), other_ = one_; \
	OPAQUE(one_); \
	(variable) ^= one_ ^ other_; \
})

/*
 * A pointer to an empty local. It is written by stores of eight bytes: what the stack had before, the
 * verifier takes for needed until one store replaces all eight bytes of it, and follows paths apart
 * that differ only there. So this is for what helpers write, and for what is written by pieces.
 */
#define EMPTY(type, name) \
	union { __u64 words[(sizeof(type) + 7) / 8]; type is; } name##_ = {}; \
	asm volatile("" : "+m"(name##_)); \
	type *const name = &name##_.is

#endif
