# SPDX-License-Identifier: Apache-2.0
"""Tables that a service draws its backends from instead of its slots (map choices).

``making`` makes the table of one list, by scheduler and weights, always the same of the same
backends: every node has the same table, whatever its ids and slots. A large one takes a tenth of a
second, so it is made in steps.

maglev    Maglev's consistent hashing (Eisenbud et al., NSDI 2016, 3.4): the size is a prime, of at
          least 100 places for each backend, and a backend fills as many as its weight says, or a
          hundredth of what the one with the largest weight does. The sizes are far apart, so that
          they seldom change: then most connections would move.
rotation  each backend as often as its weight says, and evenly spread, in one round
alias     Walker's alias method, as Vose builds it: one place for each backend, which is its own up
          to a limit, and above it another one's
"""

import math
from array import array
from collections.abc import Generator, Iterable, Iterator, Sequence
from hashlib import blake2b
from heapq import heapify, heapreplace, merge
from itertools import chain, islice
from typing import NamedTuple, TypeAlias, TypeVar

from ebpflb.model.annotations import (
    HASHING,
    LEAST_CONNECTIONS,
    MAGLEV,
    RANDOM,
    ROUND_ROBIN,
    SOURCE_HASH,
)
from ebpflb.plan.entries import Flags

# A service port's scheduler as flags of its frontends, and back (bpf/rules/scheduler.h).

_WORDS = {
    ROUND_ROBIN: "round_robin",
    LEAST_CONNECTIONS: "least_connections",
    MAGLEV: "by_tuple",
    SOURCE_HASH: "by_client",
}


def scheduler_flags(scheduler: str) -> Flags:
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


PLACES_A_STEP = 4096
PRIMES = (1021, 4093, 16381, 65521)
PLACES = 100  # of a backend, at least, as long as the largest prime allows
ALWAYS = 2**32 - 1


class Weighted(NamedTuple):
    """A backend: the index of its slot in the block, its "address:port", and its weight."""

    slot: int
    name: str
    weight: int


class TablePlace(NamedTuple):
    """Indexes of slots in the block: where 32 more bits are less than ``below``, and else."""

    slot: int
    other: int
    below: int


PackedPlaces: TypeAlias = "array[int]"  # of 32-bit numbers: those of one TablePlace after the other
_Made = TypeVar("_Made")


def is_needless(scheduler: str, weights: Iterable[int]) -> bool:
    """Whether ``size`` is 0 for all lists of backends with these weights, as it is for most."""
    return scheduler not in HASHING and len(set(weights)) <= 1


def size(scheduler: str, lists: Sequence[Sequence[Weighted]]) -> int:
    """How many places each of a service's tables has; 0: it needs none."""
    longest = max(map(len, lists))
    if scheduler in HASHING and longest:
        return next((prime for prime in PRIMES if prime >= PLACES * longest), PRIMES[-1])
    if all(len({each.weight for each in found}) <= 1 for found in lists):
        return 0
    if scheduler == ROUND_ROBIN:
        rounds = (_round(found) for found in lists if found)
        return min(max(rounds), PLACES * longest, max(longest, PRIMES[-1]))
    return longest


def making(
    scheduler: str, backends: Sequence[Weighted], count: int
) -> Generator[None, None, PackedPlaces]:
    """Makes a table of so many places, about PLACES_A_STEP with each step; of no backends it is
    empty.
    """
    if not backends:
        return array("I")
    if scheduler in HASHING:
        return _of_slots((yield from _maglev(backends, count)))
    if scheduler == ROUND_ROBIN:
        return _of_slots((yield from _rotation(backends, count)))
    return array("I", chain.from_iterable(_alias(backends, count)))


def finished(making: Generator[None, None, _Made]) -> _Made:
    """What is made, after all steps."""
    while True:
        try:
            next(making)
        except StopIteration as end:
            made: _Made = end.value
            return made


def unpacked(places: PackedPlaces) -> Iterator[TablePlace]:
    return map(TablePlace, places[0::3], places[1::3], places[2::3])


def in_block(places: PackedPlaces, first: int) -> PackedPlaces:
    """The same places, with the numbers of slots instead of indexes in a block."""
    found = array("I", places)
    found[0::3] = array("I", [first + slot for slot in places[0::3]])
    found[1::3] = array("I", [first + slot for slot in places[1::3]])
    return found


def _of_slots(slots: Sequence[int]) -> PackedPlaces:
    """A table whose places have one slot each."""
    found, column = array("I", bytes(12 * len(slots))), array("I", slots)
    found[0::3] = found[1::3] = column
    found[2::3] = array("I", [ALWAYS]) * len(slots)
    return found


def _round(backends: Sequence[Weighted]) -> int:
    weights = [each.weight for each in backends]
    return sum(weights) // math.gcd(*weights)


def _maglev(backends: Sequence[Weighted], count: int) -> Generator[None, None, list[int]]:
    """Backends take turns in the order of their names; one of a smaller weight leaves some out."""
    order = sorted(backends, key=lambda each: each.name)
    most = max(each.weight for each in order)
    weights = [max(each.weight, -(-most // PLACES)) for each in order]  # bounds the rounds
    walks = [_permutation(each.name, count) for each in order]
    credits = [0] * len(order)
    table = [-1] * count
    left = step_at = count
    while True:
        for turn, each in enumerate(order):
            credits[turn] += weights[turn]
            if credits[turn] < most:
                continue
            credits[turn] -= most
            at, skip = walks[turn]
            while table[at] >= 0:
                at = (at + skip) % count
            table[at] = each.slot
            walks[turn] = (at + skip) % count, skip
            left -= 1
            if not left:
                return table
            if step_at - left > min(PLACES_A_STEP, left // 8):  # the last places are hard to find
                step_at = left
                yield


def _permutation(name: str, count: int) -> tuple[int, int]:
    """Where a backend begins, and how far it goes on to the next place."""
    digest = blake2b(name.encode(), digest_size=16).digest()
    first, second = int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")
    return first % count, second % (count - 1) + 1


def _rotation(backends: Sequence[Weighted], count: int) -> Generator[None, None, list[int]]:
    """Each backend's turns in the middle of as many equal parts of the round."""
    counts = _apportioned([each.weight for each in backends], count)
    turns = merge(*map(_turns, backends, counts))
    found: list[int] = []
    while len(found) < count:
        if found:
            yield
        found += [slot for _, slot in islice(turns, PLACES_A_STEP)]
    return found


def _turns(backend: Weighted, count: int) -> Iterator[tuple[float, int]]:
    """When a backend has its turns, from 0 to 1."""
    return (((2 * turn + 1) / (2 * count), backend.slot) for turn in range(count))


def _apportioned(weights: Sequence[int], count: int) -> list[int]:
    """Whole numbers in the ratio of the weights, with this sum: by the largest remainders; but
    each gets one at least, of those that have most.
    """
    total = sum(weights)
    found = [weight * count // total for weight in weights]
    rest = sorted(range(len(weights)), key=lambda at: -(weights[at] * count % total))
    for at in rest[: count - sum(found)]:
        found[at] += 1
    richest = [(-its, at) for at, its in enumerate(found)]
    heapify(richest)
    for at in (at for at, its in enumerate(found) if not its):
        its, rich = richest[0]
        found[at], found[rich] = 1, found[rich] - 1
        heapreplace(richest, (its + 1, rich))
    return found


def _alias(backends: Sequence[Weighted], count: int) -> list[TablePlace]:
    """In whole numbers: every place is worth the sum of the weights, and a backend its weight times
    the number of places. Places beyond the number of backends are others' altogether.
    """
    total = sum(each.weight for each in backends)
    worth = [each.weight * count for each in backends] + [0] * (count - len(backends))
    slots = [each.slot for each in backends] + [backends[0].slot] * (count - len(backends))
    small = [at for at in range(count) if worth[at] < total]
    large = [at for at in range(count) if worth[at] >= total]
    found = [TablePlace(index, index, ALWAYS) for index in slots]
    while small and large:
        poor, rich = small.pop(), large[-1]
        found[poor] = TablePlace(slots[poor], slots[rich], (worth[poor] << 32) // total)
        worth[rich] -= total - worth[poor]
        if worth[rich] < total:
            small.append(large.pop())
    return found
