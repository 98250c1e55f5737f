# SPDX-License-Identifier: Apache-2.0
"""The plan of the maps of hand-overs: whatever is written so far, a frontend leads to its block."""

from collections import Counter
from ipaddress import IPv4Address
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from ebpflb.entries.services import Frontend
from ebpflb.model.addresses import Family
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.allocators import QUARANTINE_SECONDS
from ebpflb.plan.handing import (
    SIZES,
    THIS_NODE,
    Handed,
    HandedFrontend,
    HandedPlace,
    HandingPlan,
    HandingPlanner,
    Room,
    Station,
    table_of,
)

NODES = [Station(f"node-{n}", f"02:00:00:00:00:{n:02x}") for n in range(1, 5)]
HERE = Station("here", THIS_NODE)
ROOM = Room(4 * SIZES[1], 100)


def name(number: int, namespace: str = "shop") -> PortName:
    return PortName(namespace, f"web-{number}", "", Protocol.TCP, Family.IPV4)


def at(number: int) -> Frontend:
    return Frontend(IPv4Address(0xCB007100 + number), 80, Protocol.TCP)


def spread(*weights: int) -> tuple[tuple[Station, int], ...]:
    return tuple((node, its) for node, its in zip(NODES, weights, strict=False) if its)


class Maps:
    """The maps, to which each write of a plan is applied in its order."""

    def __init__(self) -> None:
        self.places: dict[int, HandedPlace] = {}
        self.members: set[HandedPlace] = set()
        self.frontends: dict[Frontend, HandedFrontend] = {}

    def apply(self, plan: HandingPlan) -> None:
        self.check()
        for index, place in plan.places:
            self.places[index] = place
            self.check()
        self.members.update(plan.members)
        for frontend, entry in plan.frontends.items():
            self.frontends[frontend] = entry
            self.check()
        for frontend in plan.removed_frontends:
            del self.frontends[frontend]
        self.members.difference_update(plan.removed_members)
        self.check()

    def check(self) -> None:
        """Each frontend has a whole block, whose nodes are its members."""
        for block, base, size, _ in self.frontends.values():
            found = [self.places[index] for index in range(base, base + size)]
            assert {it.block for it in found} <= {block}
            assert {*found} <= self.members

    def nodes(self, frontend: Frontend) -> Counter[str]:
        _, base, size, _ = self.frontends[frontend]
        return Counter(self.places[index].mac for index in range(base, base + size))


class Change(NamedTuple):
    """A service port is changed, or removed, after so many seconds; ``is_new``: by an agent that
    has just read the maps.
    """

    port: int
    handed: Handed | None
    passed: float
    is_new: bool


@st.composite
def changes(draw: st.DrawFn) -> Change:
    number = draw(st.integers(0, 5))
    own = draw(st.sets(st.integers(0, 2)))
    weights = draw(st.sampled_from([(), (1,), (1, 1), (1, 2), (3, 0, 1), (1, 1, 1, 1)]))
    handed = Handed(tuple(at(10 * number + it) for it in sorted(own)), spread(*weights))
    passed = draw(st.sampled_from([0.0, QUARANTINE_SECONDS]))
    return Change(number, draw(st.sampled_from([handed, None])), passed, draw(st.booleans()))


@given(st.lists(changes(), max_size=30))
def test_every_write_leaves_whole_blocks(made: list[Change]) -> None:
    """In the end all is as wanted, and nothing else is left."""
    maps, planner, now = Maps(), HandingPlanner(ROOM, 1.0), 0.0
    wanted = dict[PortName, Handed]()
    for change in made:
        now += change.passed
        if change.is_new:
            planner = HandingPlanner(ROOM, 1.0, maps.frontends, maps.places, maps.members)
            for each, handed in wanted.items():
                planner.put(each, handed)
            planner.only(wanted)
        wanted.pop(name(change.port), None)
        if change.handed:
            wanted[name(change.port)] = change.handed
        planner.put(name(change.port), change.handed)
        maps.apply(planner.take(now))
        planner.written(now)
        assert maps.frontends.keys() == {it for its in wanted.values() for it in its.frontends}
        for handed in wanted.values():
            for frontend in handed.frontends:
                assert maps.nodes(frontend) == Counter(table_of(handed.nodes))
    maps.apply(planner.take(now + QUARANTINE_SECONDS))
    tables = {table_of(it.nodes) for it in wanted.values() if it.nodes and it.frontends}
    assert len({it.block for it in maps.members}) == len(tables)


def test_a_block_is_written_before_it_is_used_and_rests_afterwards() -> None:
    planner = HandingPlanner(Room(SIZES[0] + 1, 9), 1.0)
    planner.put(name(1), Handed((at(1),), spread(1, 1)))
    assert planner.take(0.0).places
    planner.written(0.0)
    planner.put(name(1), Handed((at(1),), spread(1)))
    planner.take(0.0)
    planner.written(0.0)
    planner.put(name(2), Handed((at(2),), spread(2, 1)))
    assert planner.lacking == {name(2)}
    planner.take(0.0)
    assert planner.due == QUARANTINE_SECONDS
    assert planner.take(QUARANTINE_SECONDS).removed_members
    planner.put(name(2), Handed((at(2),), spread(2, 1)))
    assert not planner.lacking


def test_a_frontend_moves_to_another_service_port() -> None:
    """In whatever order both are planned."""
    for order in ((1, 2), (2, 1)):
        planner, maps = HandingPlanner(ROOM, 1.0), Maps()
        planner.put(name(1), Handed((at(1),), spread(1)))
        maps.apply(planner.take(0.0))
        new: dict[int, Handed | None] = {1: None, 2: Handed((at(1),), spread(0, 1))}
        for number in order:
            planner.put(name(number), new[number])
        maps.apply(planner.take(0.0))
        assert maps.nodes(at(1)) == {NODES[1].mac: 1}


def test_a_namespace_has_a_share() -> None:
    """What does not fit is not handed over, and the other namespaces' is."""
    planner, maps = HandingPlanner(ROOM, 0.5), Maps()
    for number in range(20):
        planner.put(name(number), Handed((at(number),), spread(number + 1, 100)))
    planner.put(name(1, "other"), Handed((at(100),), spread(1, 1)))
    maps.apply(planner.take(0.0))
    assert 0 < len(planner.lacking) < 20
    assert maps.nodes(at(100)).total() == SIZES[0]
    assert all(
        maps.nodes(at(number)).total() == (0 if name(number) in planner.lacking else SIZES[0])
        for number in range(20)
    )
    kept = set(range(20)) - {it for it in range(20) if name(it) in planner.lacking}
    for number in kept:
        planner.put(name(number), None)
    planner.put(name(19), Handed((at(19),), spread(20, 100)))
    assert name(19) in planner.lacking, "what rests counts: a namespace that changes has its share"
    maps.apply(planner.take(0.0))
    planner.written(0.0)
    planner.take(QUARANTINE_SECONDS)
    planner.put(name(19), Handed((at(19),), spread(20, 100)))
    assert name(19) not in planner.lacking


def test_places_that_service_ports_share_count_once() -> None:
    """As those of many Services with an endpoint on each node; they go with the last of them."""
    planner, maps = HandingPlanner(ROOM, 0.5), Maps()
    for number in range(20):
        planner.put(name(number), Handed((at(number),), spread(1, 1)))
    maps.apply(planner.take(0.0))
    assert not planner.lacking and len(maps.places) == SIZES[0]
    for number in range(20):
        planner.put(name(number), Handed((at(number),), spread(number % 2 + 1, 100)))
    assert not planner.lacking


def test_no_plan_has_more_frontends_than_the_map() -> None:
    """One write that fails would end the hand-overs of all. A namespace has its share, also of what
    an earlier agent has left.
    """
    room, maps = Room(ROOM.places, 10), Maps()
    planner = HandingPlanner(room, 0.6)
    for number in range(4):
        own = (at(10 * number), at(10 * number + 1))
        planner.put(name(number, "many"), Handed(own, spread(1)))
    planner.put(name(1, "other"), Handed((at(100),), spread(1)))
    maps.apply(planner.take(0.0))
    assert planner.lacking == {name(3, "many")} and len(maps.frontends) == 7
    planner = HandingPlanner(room, 0.6, maps.frontends, maps.places, maps.members)
    planner.put(name(2, "other"), Handed(tuple(map(at, range(200, 204))), spread(1)))
    assert planner.lacking == {name(2, "other")}
    planner.only([])
    planner.put(name(2, "other"), Handed(tuple(map(at, range(200, 204))), spread(1)))
    assert planner.lacking, "a plan writes before it removes"
    maps.apply(planner.take(1.0))
    planner.put(name(2, "other"), Handed(tuple(map(at, range(200, 204))), spread(1)))
    maps.apply(planner.take(2.0))
    assert not planner.lacking and len(maps.frontends) == 4


def test_nodes_get_places_by_their_weights() -> None:
    """Alike on every node, which is in its own table without a MAC address; a node that comes
    takes places from others, and hardly any other changes.
    """
    two = tuple((station, 100) for station in NODES[:2])
    even = Counter(table_of(two))
    assert even.total() == SIZES[0] and max(even.values()) - min(even.values()) <= 1
    own = tuple((Station(it.node, THIS_NODE if it is NODES[0] else it.mac), its) for it, its in two)
    assert [NODES[0].mac if it == THIS_NODE else it for it in table_of(own)] == [*table_of(two)]
    heavy = Counter(table_of(((NODES[0], 300), (NODES[1], 100))))
    assert 2.5 < heavy[NODES[0].mac] / heavy[NODES[1].mac] < 3.5
    before, after = table_of(two), table_of((*two, (NODES[2], 100)))
    moved = sum(old != new != NODES[2].mac for old, new in zip(before, after, strict=True))
    assert moved <= len(before) // 10


def test_the_largest_tables_are_bounded() -> None:
    many = tuple((Station(f"node-{n}", f"02:00:00:00:{n // 256:02x}:{n % 256:02x}"), 1 + n % 7)
                 for n in range(1000))  # fmt: skip
    assert len(table_of(many)) == SIZES[-1]
