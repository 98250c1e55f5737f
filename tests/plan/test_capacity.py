# SPDX-License-Identifier: Apache-2.0
"""Full maps: a service that does not fit keeps its last good state, and all others work."""

import pytest

from ebpflb.plan.allocators import Capacity
from tests.plan.builders import CAPACITY, by_name, desired, name
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
