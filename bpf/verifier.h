/* SPDX-License-Identifier: GPL-2.0 */
/* Macros that only exist for the compiler and the verifier. */
#ifndef EBPFLB_VERIFIER_H
#define EBPFLB_VERIFIER_H

/* Prevents the compiler from replacing reads after it by values that were read before it. */
#define barrier() asm volatile("" ::: "memory")

/* Makes the compiler assume nothing about the variable's value from here on. */
#define OPAQUE(variable) asm volatile("" : "+r"(variable))

/*
 * Makes the verifier treat the variable's value as unknown, so that it follows the code after it
 * once, instead of once for each known value. The verifier must not know the value of `number`.
 */
#define FORGET_VALUE(variable, number) ({ \
	__u64 one_ = (number), other_ = one_; \
	OPAQUE(one_); \
	(variable) ^= one_ ^ other_; \
})

/*
 * Keeps a local in one piece on the stack, until its scope ends. Otherwise clang makes a value of each
 * field, and each value that finds no register takes eight bytes of the stack.
 */
#define ON_STACK(variable) asm volatile("" : "=m"(variable))

/*
 * Declares a pointer to an empty local, which is written by stores of eight bytes. The verifier
 * assumes that the stack's old content is needed until one store replaces all eight bytes of it,
 * and follows paths separately that differ only there. So use this for data that helpers write, or
 * that is written in pieces.
 */
#define EMPTY(type, name) \
	union { __u64 words[(sizeof(type) + 7) / 8]; type is; } name##_ = {}; \
	asm volatile("" : "+m"(name##_)); \
	type *const name = &name##_.is

#endif
