# SPDX-License-Identifier: Apache-2.0
"""What must change in the maps of hand-overs (bpf/maps/handed.h): pure.

A frontend has a block of places, each with a node's MAC address, as often as the node's weight
says: by Maglev's hashing, so that few flows change their node when the nodes change, and alike on
every node. Frontends with equal tables share a block. A block is written before the first frontend
has it, and rests for a second after the last.

A Service of a tenant may have any number of different tables, and of addresses: the places of one
namespace have a bound, and its frontends. What does not fit is not handed over.
"""

import math
from collections import Counter
from collections.abc import Container, Iterable, Mapping
from functools import partial
from typing import NamedTuple

from ebpflb.entries.services import Frontend, Range
from ebpflb.model.annotations import MAGLEV
from ebpflb.model.endpoints import finished
from ebpflb.model.services import PortName
from ebpflb.plan import tables
from ebpflb.plan.allocators import Quarantine, SlotAllocator

THIS_NODE = "00:00:00:00:00:00"  # in place of a MAC address
SIZES = (61, 251, 1021, 4093)  # of tables: primes
PLACES = 8  # at least for a node, while the sizes allow it
_LAST_BLOCK = 2**32 - 1


class Station(NamedTuple):
    """A node in the frames of a family; its MAC address, or THIS_NODE."""

    node: str
    mac: str


class Handed(NamedTuple):
    """Which nodes the requests of a service port are handed to, with their weights.

    No nodes: only flows that have one already. ``by_client``: one node for all that a client sends.
    """

    frontends: tuple[Frontend, ...]
    nodes: tuple[tuple[Station, int], ...]
    by_client: bool = False


class HandedFrontend(NamedTuple):
    """An entry of map handed_frontends."""

    block: int
    base: int
    size: int
    by_client: int


class HandedPlace(NamedTuple):
    """An element of map handed_places, and a key of handed_members."""

    mac: str
    block: int


class HandingPlan(NamedTuple):
    """The writes, in their order."""

    places: list[tuple[int, HandedPlace]]
    members: list[HandedPlace]
    frontends: dict[Frontend, HandedFrontend]
    removed_frontends: dict[Frontend, None]
    removed_members: list[HandedPlace]

    def __bool__(self) -> bool:
        return any(self)


Table = tuple[str, ...]  # MAC addresses


class _Block(NamedTuple):
    number: int
    range: Range
    table: Table

    def members(self) -> list[HandedPlace]:
        return [HandedPlace(mac, self.number) for mac in sorted({*self.table})]


_NONE = _Block(0, Range(0, 0), ())


class Room(NamedTuple):
    """Entries of the maps handed_places and handed_frontends."""

    places: int
    frontends: int


class HandingPlanner:
    """``room``: of the maps; one namespace has a ``share`` of each. ``found``, ``places``,
    ``members``: what the maps hold; of the places those that a frontend has.
    """

    def __init__(
        self,
        room: Room,
        share: float,
        found: Mapping[Frontend, HandedFrontend] | None = None,
        places: Mapping[int, HandedPlace] | None = None,
        members: Iterable[HandedPlace] = (),
    ) -> None:
        self._slots = SlotAllocator(room.places)
        self._room, self._most = room, Room(*(int(it * share) for it in room))
        self._quarantine = Quarantine()
        self._blocks: dict[Table, _Block] = {}
        self._users: Counter[int] = Counter()  # block -> frontends
        self._used: Counter[str] = Counter()  # namespace -> places
        self._has: Counter[str] = Counter()  # namespace -> frontends
        self._sharing: Counter[tuple[str, int]] = Counter()  # namespace, block -> service ports
        self._ports: dict[PortName, tuple[_Block, tuple[Frontend, ...]]] = {}
        self._entries: dict[Frontend, tuple[PortName | None, _Block, HandedFrontend]] = {}
        self._last = 0
        self.lacking: set[PortName] = set()  # those that do not fit
        self._retired: list[HandedPlace] = []  # members that go with the next plan
        self._start_over_from(found or {}, places or {})
        if left := [it for it in members if not self._users[it.block]]:
            self._quarantine.add(partial(self._retired.extend, left))
        self._begin()

    def _start_over_from(
        self, found: Mapping[Frontend, HandedFrontend], places: Mapping[int, HandedPlace]
    ) -> None:
        blocks: dict[int, _Block] = {}
        numbers = *(it.block for it in found.values()), *(it.block for it in places.values())
        self._last = max(numbers, default=0)
        for frontend, entry in found.items():
            block = blocks.get(entry.block)
            if block is None:
                at = range(entry.base, entry.base + entry.size)
                table = tuple(it.mac for index in at if (it := places.get(index)) is not None)
                block = _Block(entry.block, Range(entry.base, entry.size), table)
                if block.number:
                    blocks[entry.block] = self._blocks[table] = block
                    self._slots.mark_used(block.range)
            self._users[block.number] += 1
            self._entries[frontend] = None, block, entry

    def _begin(self) -> None:
        self._plan = HandingPlan([], [], {}, {}, [])

    @property
    def due(self) -> float:
        """When there is something to plan without a change."""
        return -math.inf if self._retired else self._quarantine.due

    def __contains__(self, name: PortName) -> bool:
        return name in self._ports

    def hands_over(self, frontends: Iterable[Frontend]) -> bool:
        """Whether requests to one of them are handed over, not only noted."""
        return any(it in self._entries and self._entries[it][2].size for it in frontends)

    def put(self, name: PortName, handed: Handed | None) -> None:
        """Plan a service port; None, or without frontends: it is not handed over."""
        former_block, former = self._ports.pop(name, (_NONE, ()))
        self._has[name.namespace] -= len(former)
        self.lacking.discard(name)
        if handed and not self._fits(name.namespace, handed.frontends):
            self.lacking.add(name)
            handed = None
        if handed and handed.frontends:  # a block without any would never be left
            block = self._block(name, handed.nodes)
            self._ports[name] = block, handed.frontends
            self._has[name.namespace] += len(handed.frontends)
            self._count(name.namespace, block, 1)
            for frontend in handed.frontends:
                self._set(frontend, name, block, by_client=handed.by_client)
        self._count(name.namespace, former_block, -1)
        kept = set(handed.frontends if handed else ())
        for frontend in former:
            if frontend not in kept:
                self._drop(frontend, name)

    def _count(self, namespace: str, block: _Block, change: int) -> None:
        """Count a service port that has, or leaves, a block: places that several of a namespace
        share count once, and places that none has any more until they have rested.
        """
        if block is _NONE:
            return
        at, places = (namespace, block.number), {namespace: len(block.table)}
        if not self._sharing[at]:
            self._used.update(places)
        self._sharing[at] += change
        if not self._sharing[at]:
            del self._sharing[at]
            self._quarantine.add(partial(self._used.subtract, places))

    def _fits(self, namespace: str, frontends: tuple[Frontend, ...]) -> bool:
        """Whether map handed_frontends has room: a plan writes before it removes."""
        new = sum(it not in self._entries for it in frontends)
        used = len(self._entries) + len(self._plan.removed_frontends)
        is_within = self._has[namespace] + len(frontends) <= self._most.frontends
        return is_within and used + new <= self._room.frontends

    def only(self, names: Container[PortName]) -> None:
        """Remove everything else, also what an earlier agent has left."""
        for name in [it for it in self._ports if it not in names]:
            self.put(name, None)
        for frontend in [it for it, (name, *_) in self._entries.items() if name is None]:
            self._drop(frontend, None)

    def _set(self, frontend: Frontend, name: PortName, block: _Block, *, by_client: bool) -> None:
        _, former, known = self._entries.get(frontend, (None, None, None))
        entry = HandedFrontend(block.number, *block.range, by_client)
        self._users[block.number] += 1
        if former:
            self._leave(former)
        self._entries[frontend] = name, block, entry
        if frontend in self._plan.removed_frontends:
            del self._plan.removed_frontends[frontend]
        if entry != known:
            self._plan.frontends[frontend] = entry

    def _drop(self, frontend: Frontend, name: PortName | None) -> None:
        owner, block, _ = self._entries.get(frontend, (None, _NONE, None))
        if frontend not in self._entries or owner != name:
            return  # another one has it by now
        del self._entries[frontend]
        self._plan.frontends.pop(frontend, None)
        self._plan.removed_frontends[frontend] = None
        self._leave(block)

    def _leave(self, block: _Block) -> None:
        self._users[block.number] -= 1
        if self._users[block.number] or not block.number:
            return
        del self._users[block.number]
        self._blocks.pop(block.table, None)
        self._quarantine.add(partial(self._retire, block))

    def _retire(self, block: _Block) -> None:
        self._slots.free(block.range)
        self._retired += block.members()

    def _block(self, name: PortName, nodes: tuple[tuple[Station, int], ...]) -> _Block:
        table = table_of(nodes)
        if not table:
            return _NONE
        known = self._blocks.get(table)
        is_shared = known and (name.namespace, known.number) in self._sharing
        if not is_shared and len(table) > self._most.places - self._used[name.namespace]:
            self.lacking.add(name)
            return _NONE
        if known:
            return known
        found = self._slots.allocate(len(table))
        if found is None:
            self.lacking.add(name)
            return _NONE
        self._last = self._last % _LAST_BLOCK + 1
        block = self._blocks[table] = _Block(self._last, found, table)
        places = (HandedPlace(mac, block.number) for mac in table)
        self._plan.places.extend(enumerate(places, found.base))
        self._plan.members.extend(block.members())
        return block

    def take(self, now: float) -> HandingPlan:
        """Return what is to be written; times by a monotonic clock."""
        self._quarantine.release(now)
        self._plan.removed_members.extend(self._retired)
        self._retired.clear()
        plan = self._plan
        self._begin()
        return plan

    def written(self, now: float) -> None:
        self._quarantine.start(now)


def table_of(nodes: tuple[tuple[Station, int], ...]) -> Table:
    """Return the table: the same for the same nodes, whatever their order."""
    if len(nodes) <= 1:
        return tuple(station.mac for station, _ in nodes)
    wanted = PLACES * len(nodes)
    count = next((size for size in SIZES if size >= wanted), SIZES[-1])
    weighted = [
        tables.Weighted(at, station.node, weight) for at, (station, weight) in enumerate(nodes)
    ]
    places = finished(tables.making(MAGLEV, weighted, count))
    return tuple(nodes[slot][0].mac for slot in places[0::3])
