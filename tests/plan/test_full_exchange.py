# SPDX-License-Identifier: Apache-2.0
"""Full maps: a service that shrinks, or exchanges endpoints within what it had, always goes
through, whoever else waits; and removed endpoints always go."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from ebpflb.datapath.map_writer import CAPACITY as REAL
from ebpflb.plan.allocators import QUARANTINE_SECONDS, Capacity
from ebpflb.plan.desired_service import DesiredService
from ebpflb.plan.planner import Planner
from ebpflb.plan.space import KEPT_PART
from tests.load import scaled
from tests.plan.builders import CAPACITY, backend, by_name, desired, name
from tests.plan.node import PlannedNode, check_tidy

SIZE, SERVICES = 3, "abc"
IDS = SIZE * len(SERVICES)
# As many slots for each id as the real maps have.
FULL = Capacity(
    services=64,
    slots=(IDS + 1) * (REAL.slots // REAL.backend_ids),
    service_ids=64,
    backend_ids=IDS + 1,
    source_ranges=64,
    choices=64,
)
GREEDY = desired("0", [9], range(40, 40 + IDS))  # before all others by name, and wants everything

steps = some.lists(
    some.tuples(
        some.sampled_from(SERVICES),
        some.frozensets(some.integers(1, 30), max_size=SIZE),
        some.sampled_from([0.0, 0.5, QUARANTINE_SECONDS]),
    ),
    min_size=1,
    max_size=8,
)


def full_node() -> PlannedNode:
    """Every id is in use, and another service waits for some."""
    node = PlannedNode(FULL)
    first = [
        desired(each, [at], range(30 - at * SIZE, 30 - at * SIZE + SIZE))
        for at, each in enumerate(SERVICES, 1)
    ]
    node.change(by_name(*first))
    node.change(by_name(GREEDY))
    assert node.planner.not_programmed.keys() == {GREEDY.name}
    return node


def endpoints(port: DesiredService) -> set[object]:
    return {each.endpoint for each in port.backends}


def check_that_removed_endpoints_are_gone(node: PlannedNode) -> None:
    for service, entries in node.planner.actual.items():
        assert {each.endpoint for each in entries.backends} <= endpoints(node.desired[service])


@given(steps, some.booleans())
@settings(max_examples=scaled(150), deadline=None)
def test_what_stays_within_what_it_had_goes_through(
    steps: list[tuple[str, frozenset[int], float]], restarts: bool
) -> None:
    """At once what was removed goes; after the quarantine everything is as desired.

    Also where another agent goes on after each change.
    """
    node = full_node()
    for service, numbers, seconds in steps:
        if restarts:
            node.restart()
        node.wait(seconds)
        within = sorted(numbers)[: len(node.desired[name(service)].backends)]
        node.change(by_name(desired(service, [ord(service) - 96], within)))
        check_that_removed_endpoints_are_gone(node)
    for _ in range(2):
        node.wait(QUARANTINE_SECONDS)
        node.change({})
    for service in map(name, SERVICES):
        assert service not in node.planner.not_programmed
        wanted = endpoints(node.desired[service])
        assert {each.endpoint for each in node.planner.actual[service].backends} == wanted
    check_tidy(node)


@pytest.mark.parametrize("numbers", [[1], [1, 2], []])
def test_a_service_shrinks_at_once(numbers: list[int]) -> None:
    """It needs nothing that it does not have."""
    node = PlannedNode(CAPACITY._replace(backend_ids=4))
    node.change(by_name(desired("a", [1], [1, 2, 3])))
    node.change(by_name(desired("a", [1], numbers)))
    assert not node.planner.not_programmed
    assert len(node.planner.actual[name("a")].backends) == len(numbers)


def test_an_exchange_takes_effect_at_once_by_the_ids_that_are_kept() -> None:
    """Where maps are of their real proportions no client waits for an exchanged endpoint."""
    node = PlannedNode(CAPACITY._replace(backend_ids=2 * KEPT_PART, slots=8 * KEPT_PART))
    many = [backend(number) for number in range(1, 2 * KEPT_PART - 2)]
    node.change(by_name(desired("a", [1], many)))
    node.change(by_name(desired("b", [2], [200])))
    assert node.planner.not_programmed.keys() == {name("b")}, "what is kept is not for growth"
    node.change(by_name(desired("a", [1], [*many[1:], 201])))
    assert node.planner.not_programmed.keys() == {name("b")}
    assert backend(201) in node.planner.actual[name("a")].backends


def test_a_service_exchanges_its_only_frontend() -> None:
    """In a full map the old one goes first; nobody else gets its entry meanwhile."""
    node = PlannedNode(CAPACITY._replace(services=2))
    node.change(by_name(desired("b", [1], [1]), desired("c", [2], [2])))
    node.change(by_name(desired("a", [3], [3])))
    assert node.planner.not_programmed.keys() == {name("a")}
    node.change(by_name(desired("c", [4], [2])))
    for _ in range(2):
        node.wait(QUARANTINE_SECONDS)
        node.change({})
    assert node.planner.not_programmed.keys() == {name("a")}
    assert node.planner.actual[name("c")].services.keys() == desired("c", [4]).frontends.keys()
    check_tidy(node)


def test_who_waits_gets_what_is_left_when_another_service_is_deleted() -> None:
    """What was owed to it is owed no more."""
    node = full_node()
    node.change(by_name(desired("a", [1], [1, 2, 3])))  # an exchange that has to wait
    node.change({name("a"): None, name("b"): None, name("c"): None})
    node.wait_for_quarantine()
    assert not node.planner.not_programmed
    check_tidy(node)


def test_what_is_owed_is_owed_after_a_restart() -> None:
    """A service that waits for what it gave up is first, before one that would fit in there."""
    node = full_node()
    new = desired("00", [12], [61, 62, 63])
    node.change(by_name(new))
    node.change(by_name(desired("a", [1], [21, 22, 23])))
    had = {"backends": 3, "frontends": 1}
    assert node.planner.waiting.named() == {"shop/a:/TCP/IPv4": had}
    node.restart()
    assert node.planner.waiting.named() or name("a") not in node.planner.not_programmed
    for _ in range(2):
        node.wait(QUARANTINE_SECONDS)
        node.change({})
    assert node.planner.not_programmed.keys() == {GREEDY.name, new.name}
    found = {each.endpoint for each in node.planner.actual[name("a")].backends}
    assert found == endpoints(node.desired[name("a")])


def test_what_is_owed_to_a_service_that_was_deleted_meanwhile_is_free() -> None:
    """While no agent ran."""
    node = full_node()
    node.change(by_name(desired("a", [1], [21, 22, 23])))
    del node.desired[name("a")]
    node.restart()
    assert node.planner.waiting.named() == {}


@pytest.mark.parametrize("text", ["", "a", "a/b", "a/b:c/ICMP/IPv4", "a/b:c/TCP/IPv5"])
def test_what_cannot_be_read_of_what_is_owed_is_left_out(text: str) -> None:
    """The file may be of another version."""
    planner = Planner(FULL)
    planner.waiting.load({text: {"backends": 3}}, planner.actual)
    assert planner.waiting.named() == {}
