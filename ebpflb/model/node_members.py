# SPDX-License-Identifier: Apache-2.0
"""The nodes that agents run on, in the order in which this node probes them.

Each node has its own random order, so at any time every node is probed by different others.
"""

import math
import random
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping

from msgspec import Struct

from ebpflb.model.addresses import Address, number
from ebpflb.model.endpoint_slices import StoredSlice

LEFT_SECONDS = 60.0  # a node stays as long while its agent's pod is replaced

NEVER = -math.inf


class Member(Struct, eq=False):
    """Another node. Times are those at which a probe began, or a message came, in seconds.

    ``about`` is its address as a number of 128 bits, ``text`` the same in words.
    """

    name: str
    text: str
    about: int
    answered: float = NEVER
    missed: float = NEVER
    suspected: float = NEVER  # by others, or told to others
    cleared: float = NEVER  # another node said that it answers
    left: float = math.inf
    noticed: bool = False  # by this node first, as far as it knows
    answers_pings: bool = False  # has answered an echo request

    @property
    def has_answered(self) -> bool:
        """Whether it has ever answered this node; otherwise nothing is known about it."""
        return self.answered > NEVER


def addresses(slices: Iterable[StoredSlice]) -> dict[str, Address]:
    """Return the address of each node on which an agent runs; IPv4 if its agent has both."""
    found: dict[str, Address] = {}
    for slice in sorted(slices, key=lambda each: (each.family or 0, each.name)):
        for each in slice.endpoints:
            if each.name.node and not isinstance(each.address, str | None):
                found.setdefault(each.name.node, each.address)
    return found


def port(slices: Iterable[StoredSlice]) -> int:
    """Return the UDP port at which agents listen; 0 if no slice has one."""
    found = (its for each in slices for (_, kind), its in each.ports.items() if kind == "UDP")
    return min((number for numbers in found for number in numbers), default=0)


class Members:
    """All nodes but this one; ``own`` is this one, once its address is known."""

    def __init__(self, own_name: str, rng: random.Random) -> None:
        self._own_name, self._rng = own_name, rng
        self.own: Member | None = None
        self._by_text: dict[str, Member] = {}
        self._by_number: dict[int, Member] = {}
        self._order: deque[Member] = deque()
        self._leaving: set[str] = set()

    def __len__(self) -> int:
        return len(self._by_text)

    def __iter__(self) -> Iterator[Member]:
        return iter(self._by_text.values())

    def at(self, text: str) -> Member | None:
        """Return the node with this address."""
        return self._by_text.get(text)

    def about(self, number: int) -> Member | None:
        """Return the node with this address of 128 bits."""
        return self._by_number.get(number)

    def set(self, nodes: Mapping[str, Address], now: float) -> list[Member]:
        """Set the nodes; return those that are dropped. One that is missing leaves after a while.

        New ones are probed first.
        """
        own = nodes.get(self._own_name)
        if own is not None and (self.own is None or self.own.text != str(own)):
            self.own = Member(self._own_name, str(own), number(own))
        wanted = {str(at): (name, at) for name, at in nodes.items() if name != self._own_name}
        moved = [it for it in self if it.text not in wanted and it.name in nodes]
        self._drop(moved)
        self._add([Member(name, text, number(at)) for text, (name, at) in wanted.items()])
        for each in self:
            each.left = math.inf if each.text in wanted else min(each.left, now)
        self._leaving = self._by_text.keys() - wanted.keys()
        return moved

    def left(self, now: float) -> list[Member]:
        """Drop, and return, the nodes that have left long enough ago."""
        gone = [self._by_text[text] for text in self._leaving]
        gone = [each for each in gone if now - each.left >= LEFT_SECONDS]
        self._drop(gone)
        self._leaving -= {each.text for each in gone}
        return gone

    def next(self, count: int) -> list[Member]:
        """Return the next nodes to be probed, at most ``count``, and each once."""
        found: list[Member] = []
        for _ in range(len(self._order)):
            if len(found) == count:
                break
            each = self._order.popleft()
            if self._by_text.get(each.text) is each:
                self._order.append(each)
                found.append(each)
        return found

    def others(self, count: int, without: Collection[str]) -> list[Member]:
        """Return nodes at random, at most ``count``, none of those with these addresses."""
        if len(self) > 4 * (count + len(without)):
            drawn = self._rng.sample(self._order, min(count + len(without), len(self._order)))
            left = [it for it in drawn if self._by_text.get(it.text) is it]
        else:
            left = list(self)
            self._rng.shuffle(left)
        return [each for each in left if each.text not in without][:count]

    def _add(self, members: list[Member]) -> None:
        new = [each for each in members if each.text not in self._by_text]
        self._rng.shuffle(new)
        for each in new:
            self._by_text[each.text] = self._by_number[each.about] = each
            self._order.appendleft(each)

    def _drop(self, members: Iterable[Member]) -> None:
        for each in members:
            del self._by_text[each.text], self._by_number[each.about]
