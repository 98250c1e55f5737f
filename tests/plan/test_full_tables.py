# SPDX-License-Identifier: Apache-2.0
"""If map `choices` is full, a service without a table draws at random until there is space."""

from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import pytest

from ebpflb.model.annotations import MAGLEV, RANDOM
from ebpflb.plan import tables
from ebpflb.plan.allocators import Capacity
from ebpflb.plan.desired import DesiredService
from ebpflb.plan.space import UNLIMITED, Shares
from tests.plan import histories
from tests.plan.builders import CAPACITY, backend, by_name, desired, name
from tests.plan.node import PlannedNode, check_tidy

FULL = CAPACITY._replace(choices=12)  # one table of a prime of 5 places for each list, and 2 more


@pytest.fixture(autouse=True)
def small_tables() -> Iterator[None]:
    with histories.small_tables():
        yield


def hashed(*numbers: int, service: str = "a", first: int = 1) -> DesiredService:
    flags = frozenset({"endpoints"}) | tables.scheduler_flags(MAGLEV)
    return desired(service, [first], numbers, flags=flags)


def weighted(*weights: int) -> DesiredService:
    backends = [backend(number, weight=weight) for number, weight in enumerate(weights, 1)]
    return desired("a", [1], backends)


def node_with(
    port: DesiredService, capacity: Capacity = CAPACITY, shares: Shares = UNLIMITED
) -> PlannedNode:
    node = PlannedNode(capacity, shares)
    node.change(by_name(port))
    return node


@pytest.mark.parametrize(
    ("before", "after"),
    [(hashed(1, 2), hashed(1, 3)), (weighted(1, 2, 3, 4, 5), weighted(5, 4, 3, 2, 1))],
)
def test_a_change_is_served_at_random_until_the_former_table_is_free(
    before: DesiredService, after: DesiredService
) -> None:
    """New endpoints serve at once; the service is named, and gets its table later."""
    node = node_with(before, FULL)
    node.change(by_name(after))
    assert node.planner.actual[name("a")].scheduler == RANDOM
    assert len(node.planner.actual[name("a")].backends) == len(after.backends)
    (reason,) = node.not_programmed.values()
    assert reason.startswith("map choices is full (12 entries)") and "at random" in reason
    check_tidy(node)
    node.wait(2)
    assert node.planner.retry_due <= node.now
    node.change({})
    assert node.maps.view() == node_with(after).maps.view()
    check_tidy(node)


def test_the_tables_of_one_service_have_a_share() -> None:
    """If a service has its share of tables, its next port is served at random.

    Another Service still gets a table.
    """
    ports = [hashed(1, 2), hashed(3, 4, first=2), hashed(5, 6, service="b", first=3)]
    ports[1] = replace(ports[1], name=name("a")._replace(port="second"))
    node = PlannedNode(CAPACITY._replace(choices=80), Shares(1.0, service_tables=0.2))
    node.change(by_name(*ports))
    (reason,) = node.not_programmed.values()
    assert node.not_programmed.keys() == {ports[1].name}
    assert reason.startswith("the tables of one Service have at most 16 of 80 places")
    node.change(by_name(hashed(7, 8)))
    assert node.planner.actual[name("a")].scheduler == MAGLEV, "a change does not count twice"
    check_tidy(node)


def test_a_table_that_was_prepared_is_used() -> None:
    """The plan uses a table prepared in steps; a table for other backends is made again."""
    with patch.object(tables, "PLACES_A_STEP", 2):
        node = PlannedNode()
        steps = list(node.planner.preparing(hashed(1, 2)))
        assert len(steps) >= 2
        with patch.object(tables, "making", side_effect=AssertionError):
            node.change(by_name(hashed(1, 2)))
            assert not list(node.planner.preparing(hashed(1, 2))), "it has that table"
        list(node.planner.preparing(hashed(1, 3)))
        node.change(by_name(hashed(2, 3)))
        assert node.maps.view() == node_with(hashed(2, 3)).maps.view()
        check_tidy(node)
