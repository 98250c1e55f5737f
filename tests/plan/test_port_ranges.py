# SPDX-License-Identifier: Apache-2.0
"""Ranges of ports: who gets which, and the lists by which programs find them."""

from collections.abc import Mapping
from ipaddress import IPv4Address

import pytest
from hypothesis import given
from hypothesis import strategies as some

from ebpflb.kernel.maps.port_ranges import range_read
from ebpflb.model.addresses import Family
from ebpflb.model.annotations import MOST_RANGES, PortRange
from ebpflb.model.services import ANY_PORT, PortName, Protocol
from ebpflb.plan import comparison
from ebpflb.plan.desired import DesiredService
from ebpflb.plan.entries import Frontend, ranges_entry, ranges_in
from ebpflb.plan.flow_entries import StaleCandidates
from ebpflb.plan.planner import Claims, Planner
from tests.plan.builders import CAPACITY, EXTERNAL, backend
from tests.plan.simulation import Maps, writes

OLD, NEW = "2024-01-01T00:00:00Z", "2025-01-01T00:00:00Z"
NUMBERS = range(1, 31)  # of ports that are asked for
SERVICES = {f"s{n}": n for n in range(4)}


def name(service: str, protocol: Protocol = Protocol.UDP) -> PortName:
    return PortName("shop", service, ANY_PORT, protocol, Family.IPV4)


def frontend(port: int, host: int = 1, protocol: Protocol = Protocol.UDP) -> Frontend:
    """A destination; ``ranges`` and ``_replace`` make of it what the maps hold."""
    return Frontend(IPv4Address(f"203.0.113.{host}"), port, protocol)


def in_map(first: int, host: int = 1) -> Frontend:
    return frontend(first, host).ranges._replace(port=first)


def desired(
    service: str, *ranges: tuple[int, int], created: str = "", hosts: tuple[int, ...] = (1,)
) -> DesiredService:
    lasts = {in_map(first, host): last for host in hosts for first, last in ranges}
    return DesiredService(
        name(service), created, dict.fromkeys(lasts, EXTERNAL), 0, (backend(7),), lasts=lasts
    )


def owned(claims: Claims, service: str) -> set[int]:
    """The first ports of the ranges that a service gets."""
    return {each.port for each in claims.frontends_of(name(service))}


def test_the_older_service_gets_ports_that_two_want() -> None:
    """The younger one loses the range that overlaps, and keeps its others."""
    claims = Claims()
    new, old = desired("a", (10, 20), (30, 40), created=NEW), desired("b", (1, 10), created=OLD)
    claims.update({new.name: new})
    assert owned(claims, "a") == {10, 30}
    assert claims.update({old.name: old}) == {name("a"), name("b")}
    assert (owned(claims, "a"), owned(claims, "b")) == ({30}, {1})
    (contested,) = claims.ranges.contested()
    assert contested == (in_map(10), 20, name("b"), name("a"))
    assert claims.owner(in_map(10), name("a")) == name("b")
    assert claims.update({old.name: None}) == {name("a"), name("b")}
    assert owned(claims, "a") == {10, 30} and not list(claims.ranges.contested())


def test_a_range_that_is_not_served_takes_nothing_away() -> None:
    """Of three in a row that overlap the first and the last are served."""
    claims = Claims()
    ages = {"a": (1, 10), "b": (5, 15), "c": (12, 20)}
    for age, (service, ports) in enumerate(ages.items()):
        port = desired(service, ports, created=str(age))
        claims.update({port.name: port})
    assert [owned(claims, each) for each in ages] == [{1}, set(), {12}]


def test_other_addresses_do_not_matter() -> None:
    claims = Claims()
    one, two = desired("a", (1, 9), hosts=(1, 2)), desired("b", (1, 9), hosts=(2, 3), created=NEW)
    claims.update({one.name: one, two.name: two})
    assert {f.address.packed[-1] for f in claims.frontends_of(name("b"))} == {3}


def test_too_many_ranges() -> None:
    """The ranges of older Services fit; the others wait, with a reason, until one is gone."""
    planner = Planner(CAPACITY)
    ports = [desired(f"s{n:02}", (10 * n, 10 * n + 5), created=f"{n:02}") for n in range(1, 11)]
    planner.plan_changes({each.name: each for each in ports}, 0.0)
    served = {each.name for each in ports if each.name in planner.actual}
    assert served == {each.name for each in ports[:MOST_RANGES]}
    reason = planner.not_programmed[name("s09")]
    assert reason == f"older Services have {MOST_RANGES} ranges of UDP ports at 203.0.113.1"
    planner.plan_changes({ports[0].name: None}, 1.0)
    assert name("s09") in planner.actual and name("s09") not in planner.not_programmed
    assert name("s10") in planner.not_programmed


@given(some.lists(some.tuples(some.integers(1, 65535), some.integers(1, 65535)), max_size=8))
def test_a_list_as_an_entry(pairs: list[tuple[int, int]]) -> None:
    ranges = [PortRange(*sorted(pair)) for pair in pairs]
    assert ranges_in(ranges_entry(ranges)) == ranges


def lookups(maps: Maps) -> dict[Frontend, str]:
    """Destination -> the service that a program finds."""
    asked = [frontend(port, host) for port in NUMBERS for host in (1, 2)]
    found = {at: range_read(maps.services, at) for at in asked}
    for entry in filter(None, found.values()):
        assert maps.slots[entry.cluster.base].service == entry.id
    return {at: maps.service_names[entry.id].service for at, entry in found.items() if entry}


def wanted(claims: Claims) -> dict[Frontend, str]:
    return {
        frontend(port, f.address.packed[-1]): it.service
        for it, port_desired in claims.desired.items()
        for f in claims.frontends_of(it)
        for port in range(f.port, port_desired.lasts[f] + 1)
        if port in NUMBERS
    }


some_ranges = some.lists(
    some.tuples(some.sampled_from(NUMBERS), some.integers(0, 9)), max_size=3
).map(lambda pairs: [(first, first + more) for first, more in pairs])


def apart(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Those that do not overlap with one before, as an annotation has them."""
    found: list[PortRange] = []
    for each in map(PortRange._make, ranges):
        if not any(each.overlaps(other) for other in found):
            found.append(each)
    return [*found]


changes = some.dictionaries(some.sampled_from([*SERVICES]), some.none() | some_ranges, min_size=1)


class Node:
    def __init__(self) -> None:
        self.maps, self.planner, self.now = Maps(), Planner(CAPACITY), 0.0
        self.desired: dict[PortName, DesiredService] = {}

    def change(self, change: Mapping[str, list[tuple[int, int]] | None], stop: int | None) -> None:
        """Write a plan, or its first rows, and look up after each."""
        ports = {
            name(service): desired(service, *apart(ranges), created=str(SERVICES[service]))
            if ranges
            else None
            for service, ranges in change.items()
        }
        self.desired = {k: v for k, v in (self.desired | ports).items() if v}
        before = lookups(self.maps)
        self.now += 2.0
        plan = self.planner.plan_changes(ports, self.now)
        after = wanted(self.planner.claims)
        for part, row in list(writes(plan))[:stop]:
            self.maps.write(part, row)
            found = lookups(self.maps)
            for at in before.keys() | after.keys():
                allowed = {before.get(at), after.get(at)}
                assert found.get(at) in (allowed | {None} if len(allowed) > 1 else allowed)
        if stop is None:
            assert lookups(self.maps) == after
        self.planner.written(self.now)

    def restart(self) -> bool:
        """A new agent on the same maps; whether it writes anything."""
        self.planner = Planner(CAPACITY, self.maps.read_back())
        self.now += 2.0
        plan = self.planner.plan_everything(self.desired, self.now)
        for part, row in writes(plan):
            self.maps.write(part, row)
        assert lookups(self.maps) == wanted(self.planner.claims)
        self.planner.written(self.now)
        return bool(plan)


@given(steps=some.lists(changes, max_size=5))
def test_programs_find_the_old_or_the_new_service(steps: list[dict[str, object]]) -> None:
    """After every single write; and a restart writes nothing."""
    node = Node()
    for step in steps:
        node.change(step, None)  # type: ignore[arg-type]
    node.now += 2.0
    for part, row in writes(node.planner.plan_changes({}, node.now)):  # the quarantine's end
        node.maps.write(part, row)
    assert not node.restart()


@given(steps=some.lists(changes, max_size=4), stop=some.integers(0, 40))
def test_a_crash_between_two_writes(steps: list[dict[str, object]], stop: int) -> None:
    """The next agent's first plan leaves what is wanted, and its maps are as planned."""
    node = Node()
    for step in steps:
        node.change(step, stop if step is steps[-1] else None)  # type: ignore[arg-type]
    node.restart()
    read = {"services": node.maps.services.get}
    everything = {part: getattr(node.maps, part).get for part in ("slots", "backend_slots")}
    names = {part: getattr(node.maps, part).get for part in ("service_names", "backend_names")}
    for port in node.planner.actual:
        wrong = comparison.compare_service(node.planner, port, read | everything | names)
        assert not list(filter(None, wrong))
    assert not list(comparison.surplus(node.planner, "services", node.maps.services))


@pytest.mark.parametrize("damage", ["missing", "other"])
def test_a_damaged_list_is_found(damage: str) -> None:
    node = Node()
    node.change({"s1": [(1, 9)]}, None)
    listed = frontend(1).ranges
    if damage == "missing":
        del node.maps.services[listed]
    else:
        node.maps.services[listed] = ranges_entry([PortRange(1, 8)])
    entries = node.planner.actual[name("s1")]
    read = {part: getattr(node.maps, part).get for part in vars(node.maps)}
    wrong = list(filter(None, comparison.compare_service(node.planner, name("s1"), read)))
    assert [each.row[0] for each in wrong] == [listed]
    assert entries.lasts == {in_map(1): 9}


def test_which_udp_flows_may_be_stale() -> None:
    """Those to a removed endpoint in the whole range; all of them when the range has changed."""
    node = Node()
    node.change({"s1": [(1, 9)]}, None)
    node.planner.take_backend_changes()
    other = desired("s1", (1, 9), created="1")
    node.planner.plan_changes({other.name: _with_backend(other, 8)}, 9.0)
    (change,) = node.planner.take_backend_changes()
    endpoint = IPv4Address("10.1.0.7"), 8080
    assert change.candidates == {StaleCandidates(in_map(1), endpoint, 9)}
    longer = desired("s1", (1, 12), created="1")
    node.planner.plan_changes({longer.name: _with_backend(longer, 8)}, 12.0)
    (change,) = node.planner.take_backend_changes()
    assert change.candidates == {StaleCandidates(in_map(1), None, 12)}


def _with_backend(port: DesiredService, number: int) -> DesiredService:
    return DesiredService(
        port.name, port.created, port.frontends, 0, (backend(number),), lasts=port.lasts
    )
