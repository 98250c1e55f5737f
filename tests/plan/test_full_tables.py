# SPDX-License-Identifier: Apache-2.0
"""Map choices is full: a service that has a table keeps it, overwritten place by place."""

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest

from ebpflb.model.scheduler import MAGLEV, RANDOM
from ebpflb.plan import scheduling, tables
from ebpflb.plan.allocators import Capacity
from ebpflb.plan.desired_service import DesiredService
from ebpflb.plan.entries import NO_TABLE, Range
from ebpflb.plan.table_space import PLACES_KEPT
from tests.plan import histories
from tests.plan.builders import CAPACITY, SERVING, backend, by_name, desired, name
from tests.plan.node import PlannedNode, check_tidy
from tests.plan.simulation import writes

FULL = CAPACITY._replace(choices=12)  # one table of a prime of 5 places for each list, and 2 more


@pytest.fixture(autouse=True)
def small_tables() -> Iterator[None]:
    with patch.multiple(tables, **histories.SMALL_TABLES):
        yield


def hashed(*numbers: int, service: str = "a", first: int = 1) -> DesiredService:
    flags = frozenset({"endpoints"}) | scheduling.flags_of(MAGLEV)
    return desired(service, [first], numbers, flags=flags)


def weighted(*weights: int) -> DesiredService:
    backends = [backend(number, weight=weight) for number, weight in enumerate(weights, 1)]
    return desired("a", [1], backends)


def node_with(port: DesiredService, capacity: Capacity = FULL) -> PlannedNode:
    node = PlannedNode(capacity)
    node.change(by_name(port))
    return node


def in_an_empty_map(port: DesiredService) -> object:
    return node_with(port, CAPACITY).maps.view()


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (hashed(1, 2), hashed(1, 3)),
        (hashed(1, 2), hashed(2)),
        (weighted(1, 2, 3, 4, 5), weighted(5, 4, 3, 2, 1)),
        (weighted(1, 2, 3, 4, 5), weighted(1, 0, 3, 4, 5)),
    ],
)
def test_a_change_is_in_force_at_once(before: DesiredService, after: DesiredService) -> None:
    """As with an empty map: new weights and endpoints, and none of those that went."""
    node = node_with(before)
    had = node.planner.actual[name("a")].tables
    node.change(by_name(after))
    assert node.planner.actual[name("a")].tables == had
    assert node.maps.view() == in_an_empty_map(after)
    assert not node.planner.space.tables.without_table
    check_tidy(node)


def test_too_small_a_table_is_lost_and_another_one_tried_again() -> None:
    """Only then: connections go at random until there is room."""
    node = node_with(hashed(1, 2))
    node.change(by_name(hashed(1, 2, 3, 4, 5, 6)))
    assert node.planner.space.tables.without_table.keys() == {name("a")}
    assert node.planner.actual[name("a")].scheduler == RANDOM
    node.change(by_name(hashed(1, 2)))
    node.wait(2)
    node.change({})
    assert node.maps.view() == in_an_empty_map(hashed(1, 2))
    check_tidy(node)


def test_a_table_of_another_size_is_exchanged_when_there_is_room() -> None:
    """Of three endpoints it should have 11 places: it has 5, until another service goes."""
    node = node_with(hashed(1, 2), CAPACITY._replace(choices=32))
    node.change(by_name(hashed(7, 8, service="b", first=2)))
    node.change(by_name(hashed(1, 2, 3)))
    assert node.planner.actual[name("a")].tables.size == 10
    assert node.planner.space.tables.cramped.keys() == {name("a")}
    node.change({name("b"): None})
    node.wait(2)
    node.change({})
    assert node.maps.view() == in_an_empty_map(hashed(1, 2, 3))
    check_tidy(node)


def test_some_places_are_kept_for_who_has_a_table() -> None:
    """A new service cannot have the last ones; one that has a table can, and exchanges it."""
    node = node_with(hashed(1, 2), CAPACITY._replace(choices=10 * PLACES_KEPT))
    for number in range(2, PLACES_KEPT):
        node.change(by_name(hashed(3, service=f"s{number}", first=number)))
    assert not node.planner.space.tables.without_table
    node.change(by_name(hashed(3, service="last", first=PLACES_KEPT)))
    assert node.planner.space.tables.without_table.keys() == {name("last")}
    had = node.planner.actual[name("a")].tables
    node.change(by_name(hashed(1, 3)))
    assert node.planner.actual[name("a")].tables != had


@pytest.mark.parametrize("back", [False, True])
def test_a_crash_while_a_table_is_overwritten_is_mended(back: bool) -> None:
    """Whatever is desired then, also if it is what was there before; and what the places lead to is
    not given away until they are overwritten.
    """
    before, after = hashed(1, 2), hashed(1, 3)
    rows = len(list(writes(node_with(before).change(by_name(after)))))
    for stop in range(rows + 1):
        node = node_with(before)
        node.change(by_name(after), stop=stop)
        node.desired = by_name(before if back else after, desired("new", [9], [7, 8]))
        node.restart()
        check_tidy(node)
        assert node.planner.actual[name("a")].tables == Range(0, 10)
        found, wanted = node.maps.view(), in_an_empty_map(before if back else after)
        assert isinstance(wanted, dict)
        assert {at: found[at] for at in wanted} == wanted
        node.wait_for_quarantine()
        assert not node.restart()


def test_equal_weights_are_told_with_maglev_alone() -> None:
    """Then a socket needs no table (path/scheduler.h)."""
    uneven = replace(hashed(), backends=(backend(1, weight=1), backend(2)))
    drained = replace(hashed(), backends=(backend(2), backend(1, SERVING, weight=1)))
    by_flags = {
        port: {"even" in it.flags for it in node_with(found, CAPACITY).maps.services.values()}
        for port, found in {
            "even": hashed(1, 2),
            "uneven": uneven,
            "drained": drained,
            "random": weighted(1, 1),
        }.items()
    }
    assert by_flags == {"even": {True}, "uneven": {False}, "drained": {True}, "random": {False}}


def test_without_a_table_none_is_overwritten() -> None:
    node = node_with(replace(hashed(), backends=()))
    assert node.planner.actual[name("a")].tables == NO_TABLE
