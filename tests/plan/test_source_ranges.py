# SPDX-License-Identifier: Apache-2.0
"""The clients that restricted frontends admit, and the order of the writes (planner.py)."""

from ebpflb.model.addresses import Network
from ebpflb.plan.desired import DesiredService
from tests.plan.builders import (
    CAPACITY,
    CLIENTS,
    EXTERNAL,
    FIRST,
    RESTRICTED,
    SECOND,
    THIRD,
    by_name,
    desired,
    frontend,
    name,
)
from tests.plan.node import PlannedNode, check_tidy


def restricted(*networks: Network, service: str = "web", number: int = 1) -> DesiredService:
    """Return a port with one restricted frontend and one backend."""
    return desired(service, [number], [number], source_ranges=networks, flags=RESTRICTED)


OPEN = desired("web", [1], [1], flags=EXTERNAL)


def let_in(node: PlannedNode) -> list[bool]:
    return [node.maps.admitted(frontend(1), client) for client in CLIENTS]


FULL = "map source_ranges is full (3 entries)"


def test_full_map() -> None:
    """A range that does not fit is left out, and added when there is room."""
    node = PlannedNode(CAPACITY._replace(source_ranges=3))
    node.change(by_name(restricted(FIRST, SECOND)))
    node.change(by_name(restricted(FIRST, THIRD, service="db", number=2)))
    assert node.not_programmed == {name("db"): FULL}
    assert [node.maps.admitted(frontend(2), client) for client in CLIENTS] == [False, False, True]
    assert not node.change({})
    node.change(by_name(restricted(FIRST)))
    assert node.not_programmed == {name("db"): FULL}
    node.change({})
    assert node.not_programmed == {}
    assert [node.maps.admitted(frontend(2), client) for client in CLIENTS] == [True, False, True]
    check_tidy(node)


def test_restriction_of_what_does_not_fit_fails_closed() -> None:
    """A restriction takes effect even if the service's new backends do not fit.

    The service keeps its old backends, for the admitted clients.
    """
    node = PlannedNode(CAPACITY._replace(slots=1))
    node.change(by_name(OPEN))
    grown = desired("web", [1], [1, 2], source_ranges=[FIRST], flags=RESTRICTED)
    node.change(by_name(grown))
    assert node.not_programmed.keys() == {name("web")}
    assert let_in(node) == [True, False, False]
    assert len(node.maps.lookup(frontend(1)).cluster) == 1
    check_tidy(node)


def test_opening_does_not_wait_for_endpoints_that_do_not_fit() -> None:
    """The admitted clients change at once; only the new endpoint waits."""
    node = PlannedNode(CAPACITY._replace(slots=1))
    node.change(by_name(restricted(FIRST)))
    node.change(by_name(desired("web", [1], [1, 2], flags=EXTERNAL)))
    assert node.not_programmed.keys() == {name("web")}
    assert let_in(node) == [True, True, True]
    check_tidy(node)
