/* SPDX-License-Identifier: GPL-2.0 */
/*
 * Records the steps of a decision in the recording variant (-DRECORD), which `ebpflb explain` runs.
 * Without -DRECORD these macros compile to nothing and do not evaluate their arguments.
 */
#ifndef EBPFLB_RECORD_RECORD_H
#define EBPFLB_RECORD_RECORD_H

#ifdef RECORD

#include "record/steps.h"

static __always_inline void record_step(enum step_kind what, __u32 value, const struct address *address)
{
	struct steps *found = LOOKUP_NUMBER(struct steps, steps, 0);
	struct step *step;

	if (!found || found->count >= STEPS)
		return;
	step = &found->step[found->count++];
	step->what = what;
	step->value = value;
	if (address)
		step->address = *address;
}

#define record(what, value) record_step(what, value, NULL)
#define record_at(what, value, address) record_step(what, value, address)

#else

#define record(what, value) ((void)0)
#define record_at(what, value, address) ((void)0)

#endif
#endif
