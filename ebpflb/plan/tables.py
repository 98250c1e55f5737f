# SPDX-License-Identifier: Apache-2.0
"""Tables from which a service draws its backends instead of from its slots (map choices).

``making`` computes the table of one list from scheduler and weights. The same backends always give
the same table, so every node has the same table, whatever its ids and slots. A large table takes a
tenth of a second, so it is computed in steps.

maglev    Maglev's consistent hashing (Eisenbud et al., NSDI 2016, 3.4). The size is a prime with
          at least 100 places for each backend. A backend fills as many places as its weight says,
          but at least a hundredth of those of the backend with the largest weight. The sizes are
          far apart, so they seldom change: a change moves most connections.
rotation  each backend as often as its weight says, evenly spread over one round
alias     Walker's alias method, as Vose builds it: one place for each backend; the place leads to
          this backend up to a limit, and to another backend above the limit
"""

import math
from array import array
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from heapq import heapify, heapreplace, merge
from itertools import chain, islice
from typing import NamedTuple, TypeAlias

from ebpflb.entries.services import Choice, Flags
from ebpflb.model import annotations
from ebpflb.model.endpoints import Steps, in_parts

# The scheduler of a service port as flags of its frontends, and back (bpf/rules/scheduler.h).

_WORDS = {
    annotations.ROUND_ROBIN: "round_robin",
    annotations.LEAST_CONNECTIONS: "least_connections",
    annotations.MAGLEV: "by_tuple",
    annotations.SOURCE_HASH: "by_client",
}


def scheduler_flags(scheduler: str) -> Flags:
    return frozenset({_WORDS[scheduler]} if scheduler in _WORDS else ())


def at_random(flags: Flags) -> Flags:
    """Return the flags with the scheduler random."""
    return flags - frozenset(_WORDS.values())


def scheduler_of(flags: Flags) -> str:
    """Return the scheduler, from all flags of a frontend."""
    return next((name for name, word in _WORDS.items() if word in flags), annotations.RANDOM)


def marked(flags: Flags) -> Flags:
    """Add the flag that all weights are equal: with maglev, a socket then needs no table."""
    return flags | {"even"} if _WORDS[annotations.MAGLEV] in flags else flags


PLACES_A_STEP, STEP_COST = 4096, 400
PRIMES = (1021, 4093, 16381, 65521)
PLACES = 100  # minimum for a backend, as far as the largest prime allows
ALWAYS = 2**32 - 1


class Weighted(NamedTuple):
    """A backend: the index of its slot in the block, its "address:port", and its weight."""

    slot: int
    name: str
    weight: int


# 32-bit numbers: the fields of one Choice after another, with indexes in the block as slots.
PackedPlaces: TypeAlias = "array[int]"


def size(scheduler: str, lists: Sequence[Sequence[int]]) -> int:
    """Return the number of places of each of a service's tables; 0: it needs none.

    ``lists``: the weights of the backends in each.
    """
    longest = max(map(len, lists))
    if scheduler in annotations.HASHING and longest:
        return next((prime for prime in PRIMES if prime >= PLACES * longest), PRIMES[-1])
    if all(len(set(found)) <= 1 for found in lists):
        return 0
    if scheduler == annotations.ROUND_ROBIN:
        rounds = (sum(found) // math.gcd(*found) for found in lists if found)
        return min(max(rounds), PLACES * longest, max(longest, PRIMES[-1]))
    return longest


def making(scheduler: str, backends: Sequence[Weighted], count: int) -> Steps[PackedPlaces]:
    """Compute a table with ``count`` places, about PLACES_A_STEP in each step.

    The table is empty if there are no backends.
    """
    if not backends:
        return array("I")
    if scheduler in annotations.HASHING:
        return _of_slots((yield from _maglev(backends, count)))
    if scheduler == annotations.ROUND_ROBIN:
        return _of_slots((yield from _rotation(backends, count)))
    return array("I", chain.from_iterable(_alias(backends, count)))


def in_block(places: PackedPlaces, first: int) -> PackedPlaces:
    """Return the places with numbers of slots instead of indexes in a block."""
    slots, others = places[0::3], places[1::3]
    found = array("I", places)
    found[0::3] = moved = array("I", map(first.__add__, slots))
    found[1::3] = moved if others == slots else array("I", map(first.__add__, others))
    return found


def _of_slots(slots: Sequence[int]) -> PackedPlaces:
    """Return a table whose places have one slot each."""
    found, column = array("I", bytes(12 * len(slots))), array("I", slots)
    found[0::3] = found[1::3] = column
    found[2::3] = array("I", [ALWAYS]) * len(slots)
    return found


def _maglev(backends: Sequence[Weighted], count: int) -> Steps[list[int]]:
    """Let backends take turns in the order of their names; smaller weights skip some turns."""
    order = sorted(backends, key=lambda each: each.name)
    most = max(each.weight for each in order)
    weights = [max(each.weight, -(-most // PLACES)) for each in order]  # limits the rounds
    walks = list[tuple[int, int]]()
    for part in in_parts(order):
        yield STEP_COST
        walks += [_permutation(each.name, count) for each in part]
    credits = [0] * len(order)
    table = [-1] * count
    free = step_at = count
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
            free -= 1
            if not free:
                return table
            if step_at - free > min(PLACES_A_STEP, free // 8):  # the last places take the longest
                step_at = free
                yield STEP_COST


def _permutation(name: str, count: int) -> tuple[int, int]:
    """Return where a backend begins in the table, and its step to the next place."""
    digest = blake2b(name.encode(), digest_size=16).digest()
    first, second = int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")
    return first % count, second % (count - 1) + 1


def _rotation(backends: Sequence[Weighted], count: int) -> Steps[list[int]]:
    """Put each backend's turns in the middle of equal parts of the round."""
    counts = _apportioned([each.weight for each in backends], count)
    turns = merge(*map(_turns, backends, counts))
    found: list[int] = []
    while len(found) < count:
        if found:
            yield STEP_COST
        found += [slot for _, slot in islice(turns, PLACES_A_STEP)]
    return found


def _turns(backend: Weighted, count: int) -> Iterator[tuple[float, int]]:
    """Yield the times of a backend's turns, from 0 to 1."""
    return (((2 * turn + 1) / (2 * count), backend.slot) for turn in range(count))


def _apportioned(weights: Sequence[int], count: int) -> list[int]:
    """Return whole numbers in the ratio of the weights, with the sum ``count``.

    The largest remainders are rounded up. Each backend gets at least one, taken from those with the
    most.
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


def _alias(backends: Sequence[Weighted], count: int) -> list[Choice]:
    """Build the alias table in whole numbers.

    Every place is worth the sum of the weights, and a backend its weight times the number of
    places. Places beyond the number of backends belong to other backends entirely.
    """
    total = sum(each.weight for each in backends)
    worth = [each.weight * count for each in backends] + [0] * (count - len(backends))
    slots = [each.slot for each in backends] + [backends[0].slot] * (count - len(backends))
    small = [at for at in range(count) if worth[at] < total]
    large = [at for at in range(count) if worth[at] >= total]
    found = [Choice(index, index, ALWAYS) for index in slots]
    while small and large:
        poor, rich = small.pop(), large[-1]
        found[poor] = Choice(slots[poor], slots[rich], (worth[poor] << 32) // total)
        worth[rich] -= total - worth[poor]
        if worth[rich] < total:
            small.append(large.pop())
    return found
