/* SPDX-License-Identifier: GPL-2.0 */
/* What a packet hook has decided: the verdict to count, and whether the packet gets a new tuple. */
#ifndef EBPFLB_PATH_OUTCOME_H
#define EBPFLB_PATH_OUTCOME_H

#include "layout.h"

struct outcome {
	enum verdict verdict;
	bool rewrite;
};

/* The packet keeps its tuple; the verdict says whether it goes on. */
static __always_inline struct outcome unchanged(enum verdict verdict)
{
	return (struct outcome){ .verdict = verdict };
}

/* The packet goes on with its new tuple. */
static __always_inline struct outcome rewritten(enum verdict verdict)
{
	return (struct outcome){ .verdict = verdict, .rewrite = true };
}

#endif
