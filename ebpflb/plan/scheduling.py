# SPDX-License-Identifier: Apache-2.0
"""A service port's scheduler as flags of its frontends, and back (bpf/rules/scheduler.h)."""

from ebpflb.model.scheduler import (
    LEAST_CONNECTIONS,
    MAGLEV,
    RANDOM,
    ROUND_ROBIN,
    SOURCE_HASH,
)
from ebpflb.plan.entries import Flags

_WORDS = {
    ROUND_ROBIN: "round_robin",
    LEAST_CONNECTIONS: "least_connections",
    MAGLEV: "by_tuple",
    SOURCE_HASH: "by_client",
}


def flags_of(scheduler: str) -> Flags:
    """What a frontend's flags have for it, one of SCHEDULERS."""
    return frozenset({_WORDS[scheduler]} if scheduler in _WORDS else ())


def at_random(flags: Flags) -> Flags:
    """The same flags with no other scheduler."""
    return flags - frozenset(_WORDS.values())


def scheduler_of(flags: Flags) -> str:
    """The inverse, of all flags of a frontend."""
    return next((name for name, word in _WORDS.items() if word in flags), RANDOM)


def marked(flags: Flags) -> Flags:
    """Where all weights are the same: a socket needs no table with maglev."""
    return flags | {"even"} if _WORDS[MAGLEV] in flags else flags
