# SPDX-License-Identifier: Apache-2.0
"""No tenant affects another one: a namespace has at most its share of each map."""

import math
from collections.abc import Iterator
from dataclasses import replace
from ipaddress import IPv4Address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some
from hypothesis.strategies import SearchStrategy

from ebpflb.entries.services import Frontend
from ebpflb.model.addresses import Family
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan import tables
from ebpflb.plan.allocators import Capacity
from ebpflb.plan.desired import DesiredService, Lack
from ebpflb.plan.service_entries import ServiceEntries
from ebpflb.plan.space import EVERYONE, MOST_TRIED, Shares, Waiting
from tests.load import scaled
from tests.plan import histories
from tests.plan.builders import FIRST, RESTRICTED, SECOND, THIRD, backend, desired
from tests.plan.node import PlannedNode, check_tidy, used_by

CAPACITY = Capacity(
    services=16, slots=256, service_ids=16, backend_ids=33, source_ranges=12, choices=400
)


@pytest.fixture(autouse=True, scope="module")
def small_tables() -> Iterator[None]:
    """Make tables small, because each place is looked up after each write."""
    with histories.small_tables():
        yield


HALF = Shares(namespace=0.5, service_tables=1.0)
RANGES = (FIRST, SECOND, THIRD)


def port(
    namespace: str, number: int, backends: range, ranges: int = 0, scheduler: str = "random"
) -> DesiredService:
    """Return a port with one frontend, whose address depends on this namespace."""
    address = IPv4Address(f"172.30.{len(namespace)}.{number}")
    flags = (RESTRICTED if ranges else frozenset({"endpoints"})) | tables.scheduler_flags(scheduler)
    found = desired("", {Frontend(address, 80, 6): flags}, [backend(each) for each in backends])
    name = PortName(namespace, f"s{number}", "", Protocol.TCP, Family.IPV4)
    return replace(found, name=name, source_ranges=RANGES[:ranges])


def _services(
    namespace: str, most: int, backends: SearchStrategy[range], most_ranges: int
) -> SearchStrategy[DesiredService]:
    """Return this number of services of one namespace."""
    numbers, ranges = some.integers(1, most), some.integers(0, most_ranges)
    schedulers = some.sampled_from(["random", "maglev"])
    return some.builds(port, some.just(namespace), numbers, backends, ranges, schedulers)


_greedy = _services(
    "tenant", 12, some.builds(range, some.integers(1, 20), some.integers(20, 40)), 3
)
# In use and at rest it never has more than half of a map.
_small = _services("v", 2, some.builds(range, some.integers(1, 3), some.integers(4, 5)), 1)
_steps = some.lists(
    some.tuples(
        some.lists(some.tuples(_greedy, some.booleans()), max_size=4),
        some.none() | _small,
        some.sampled_from([0.0, 0.5, 1.0]),
    ),
    max_size=8,
)


@given(_steps)
@settings(max_examples=scaled(60), deadline=None)
def test_a_greedy_namespace_takes_nothing_from_another_one(
    steps: list[tuple[list[tuple[DesiredService, bool]], DesiredService | None, float]],
) -> None:
    """The other namespace's changes apply at once; the greedy namespace has at most half, including
    what it has just freed.
    """
    node = PlannedNode(CAPACITY, HALF)
    for greedy, small, seconds in steps:
        changes = {it.name: None if gone else it for it, gone in greedy}
        node.change(changes | ({small.name: small} if small else {}))
        assert {name.namespace for name in node.not_programmed} <= {"tenant"}
        for part, used in used_by(node, "tenant").items():
            if part == "slots":  # its former blocks may come on top
                used = sum(it.block.size for it in _entries_of(node, "tenant"))
            assert used <= node.planner.space.most(part)
        if small:
            assert node.planner.actual[small.name].backends == small.backends
            assert len(node.planner.actual[small.name].source_ranges) == len(small.source_ranges)
        check_tidy(node)
        node.wait(seconds)
    node.change(dict.fromkeys(node.desired))
    node.wait_for_quarantine()
    assert not any(used_by(node, "tenant").values())


def _entries_of(node: PlannedNode, namespace: str) -> list[ServiceEntries]:
    return [it for name, it in node.planner.actual.items() if name.namespace == namespace]


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_a_service_of_any_size_can_change(share: float) -> None:
    """Endpoints take at most a third of the slots, so there is room for new ones beside the former
    ones. Each change may wait for the end of a quarantine.
    """
    many = CAPACITY._replace(backend_ids=400, endpoints=CAPACITY.slots // 3)
    node, most = PlannedNode(many, Shares(share, 1.0)), math.ceil(many.endpoints * share)
    name = port("tenant", 1, range(1)).name

    def change(backends: range) -> int:
        node.change({name: port("tenant", 1, backends)})
        while node.planner.retry_due <= node.now + 1:
            node.wait(1)
            node.change({})
        check_tidy(node)
        return len(node.planner.actual[name].backends)

    assert change(range(most)) == most
    assert [change(range(most - less)) for less in (1, 2, 3, most // 2)] == [
        *(most - 1, most - 2, most - 3, most - most // 2)
    ]
    assert change(range(most)) == most
    change(range(most + 1))
    assert node.not_programmed, "a third of the slots"
    assert [change(range(less, most + less - 1)) for less in (1, 2, 3)] == [most - 1] * 3
    assert not node.not_programmed


def test_the_share_is_named_with_the_option() -> None:
    """The share is named with its option in the log, in an Event and in `services get`."""
    node = PlannedNode(CAPACITY, HALF)
    node.change({(wanted := port("tenant", 1, range(1, 30))).name: wanted})
    (reason,) = node.not_programmed.values()
    share = "namespace tenant already has its share of map backend_slots"
    assert reason == f"{share} (17 of 33 entries, see --namespace-share)"


def test_what_others_free_is_not_tried_by_who_has_its_share() -> None:
    """A waiting port whose namespace has its share is not tried when other namespaces free space.

    So another tenant's changes cost no time, however many ports wait.
    """
    node = PlannedNode(CAPACITY, HALF)
    many = {it.name: it for it in (port("tenant", n, range(1, 9)) for n in range(1, 6))}
    node.change(many | {(small := port("v", 1, range(1, 3))).name: small})
    assert len(node.not_programmed) == 3
    node.change({small.name: None})
    node.wait(2)
    node.change({})
    assert node.planner.waiting.take(lambda name, lack: False) == []


@given(some.integers(0, 200), some.integers(1, 3))
@settings(max_examples=scaled(30), deadline=None)
def test_each_waiting_port_is_tried_once_for_what_was_freed(count: int, frees: int) -> None:
    """A few ports are tried at a time, even if none of them fits."""
    waiting = Waiting()
    names = [port("tenant", number % 250, range(1)).name for number in range(1, count + 1)]
    for number, name in enumerate(names):
        scope = "tenant" if number % 2 else EVERYONE
        waiting.set(name._replace(port=str(number)), Lack(scope, "slots", 1, "full"))
    assert not waiting.take(lambda name, lack: False)
    for _ in range(frees):
        waiting.freed("tenant")
    tried: list[PortName] = []
    while waiting.has_tries:
        found = waiting.take(lambda name, lack: False)
        assert len(found) <= 2 * MOST_TRIED
        tried += found
    assert sorted(tried) == sorted(name for ports in waiting.lacks.values() for name in ports)
