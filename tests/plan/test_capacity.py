# SPDX-License-Identifier: Apache-2.0
"""Full maps: a service that does not fit keeps its last good state, and all others work."""

import pytest

from ebpflb.entries.services import Range
from ebpflb.plan.allocators import Capacity
from ebpflb.plan.desired import DesiredService
from tests.plan.builders import CAPACITY, backend, by_name, desired, frontend, name
from tests.plan.node import PlannedNode, check_tidy

A, B = desired("a", [1, 2], [1, 2]), desired("b", [3, 4], [3, 4])
FULL = [
    (CAPACITY._replace(services=3), "map services is full (3 entries)"),
    (CAPACITY._replace(service_ids=2), "map service_stats is full (2 entries)"),
    (CAPACITY._replace(backend_ids=4), "map backend_slots is full (4 entries)"),
    (CAPACITY._replace(slots=3), "map slots is full (3 entries)"),
]
each_map = pytest.mark.parametrize(("capacity", "message"), FULL)


@each_map
def test_new_service_does_not_fit(capacity: Capacity, message: str) -> None:
    """A service that does not fit is named with the full map, and no part of it is written."""
    node = PlannedNode(capacity)
    node.change(by_name(A, B))
    assert node.not_programmed == {name("b"): message}
    assert node.maps.services.keys() == A.frontends.keys()
    check_tidy(node)


@each_map
def test_placed_when_room_appears(capacity: Capacity, message: str) -> None:
    """A service that did not fit is tried again when the quarantine is over, without a change."""
    node = PlannedNode(capacity)
    node.change(by_name(A, B))
    node.change({name("a"): None})
    node.wait(2)
    node.change({})
    assert node.not_programmed == {}
    assert node.maps.services.keys() == B.frontends.keys()
    check_tidy(node)


@pytest.mark.parametrize(
    ("capacity", "grown"),
    [
        (CAPACITY._replace(services=4), desired("b", [3, 4, 5], [3])),
        (CAPACITY._replace(slots=5), desired("b", [4], [3, 5])),
        (CAPACITY._replace(backend_ids=5), desired("b", [3], [3, 5])),
    ],
)
def test_what_is_not_wanted_any_more_goes(capacity: Capacity, grown: DesiredService) -> None:
    """If a service outgrows a map, its removed endpoints and frontends go, and the rest serves."""
    node = PlannedNode(capacity)
    node.change(by_name(A, B))
    node.change(by_name(grown))
    assert node.not_programmed.keys() == {name("b")}
    assert {b.endpoint for b in node.planner.actual[name("b")].backends} == {backend(3).endpoint}
    mine = {f for f, owner in node.planner.frontends.owners.items() if owner == name("b")}
    assert mine == grown.frontends.keys() & B.frontends.keys()
    check_tidy(node)


def test_half_flipped_and_full() -> None:
    """A crash between two frontends, and then no room: all refer to the block that is used."""
    node = PlannedNode(CAPACITY._replace(slots=8))
    node.change(by_name(A))
    node.change(by_name(desired("a", [1, 2], [1, 2, 3])), stop=1 + 1 + 3 + 3 + 1 + 1)
    assert {s.block for s in node.maps.services.values()} == {Range(0, 2), Range(2, 3)}
    node.desired = by_name(desired("a", [1, 2], [1, 2, 3, 4]))
    node.restart()
    assert {s.block for s in node.maps.services.values()} == {Range(2, 3)}
    node.wait(2)
    node.change(by_name(B))
    assert node.planner.actual[name("b")].block == Range(0, 2)
    assert len(node.maps.lookup(frontend(2)).cluster) == 3
    check_tidy(node)
