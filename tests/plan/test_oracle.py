# SPDX-License-Identifier: Apache-2.0
"""The property tests can fail: deliberate mistakes are noticed."""

from collections.abc import Callable
from typing import Any

import pytest

from ebpflb.entries.services import Range, Translation, source_range_key
from ebpflb.plan.desired import DesiredService
from ebpflb.plan.planner import Planner
from tests.plan.builders import (
    CAPACITY,
    FIRST,
    RESTRICTED,
    SECOND,
    by_name,
    desired,
    frontend,
    name,
)
from tests.plan.node import PlannedNode, check_tidy
from tests.plan.simulation import Write, WrongLookup, writes

WEB = desired("web", [1, 2], [1, 2])
NOBODYS = frontend(200).address
FIRST_BACKEND = WEB.backends[0]
TRANSLATION = Translation(1, FIRST_BACKEND.address, FIRST_BACKEND.port)
CHANGED = desired("web", [1, 2], [2, 3, 4])


def served() -> PlannedNode:
    node = PlannedNode()
    node.change(by_name(WEB))
    node.wait(2)
    return node


FIRST_SLOT = served().maps.slots[0]


def test_without_quarantine() -> None:
    """A block that is used again at once is overwritten while a reader uses it, which is
    noticed.
    """
    node = served()
    node.change(by_name(CHANGED))
    node.planner.quarantine.release(node.now + 1)
    with pytest.raises(WrongLookup, match="overwritten under a reader"):
        node.change(by_name(desired("web", [1, 2], [5])))


def test_former_backend_still_found() -> None:
    """An entry that is not removed leads clients to a removed backend, which is noticed."""
    node = served()
    plan = node.planner.plan_changes(by_name(CHANGED), node.now)
    plan.removed_backend_slots.clear()
    node.write_rows(list(writes(plan)))
    with pytest.raises(AssertionError):
        check_tidy(node)


def late(part: str) -> Callable[[list[Write]], list[Write]]:
    """Move the rows of this part after all others."""
    return lambda rows: sorted(rows, key=lambda row: row[0] == part)


def early(part: str) -> Callable[[list[Write]], list[Write]]:
    """Move the rows of this part before all others."""
    return lambda rows: sorted(rows, key=lambda row: row[0] != part)


ORDERS: dict[str, tuple[Callable[[list[Write]], list[Write]], str]] = {
    "netfilter gets an endpoint too late": (late("translations"), "netfilter does not translate"),
    "netfilter loses an endpoint too early": (
        lambda rows: [*rows, ("removed_translations", TRANSLATION)],
        "overwritten under a reader",
    ),
    "everything in reverse": (lambda rows: rows[::-1], "service 1 reads"),
    "frontends before their slots": (early("services"), "service 1 reads"),
    "a frontend is away before it is written": (
        lambda rows: [("removed_services", frontend(1)), *rows],
        "meanwhile",
    ),
}


@pytest.mark.parametrize("case", ORDERS)
def test_wrong_order(case: str) -> None:
    """A plan whose rows are written in a wrong order breaks a look-up."""
    order, error = ORDERS[case]
    node = served()
    plan = node.planner.plan_changes(by_name(CHANGED), node.now)
    with pytest.raises(WrongLookup, match=error):
        node.write_rows(order(list(writes(plan))))


@pytest.mark.parametrize(
    ("case", "wrong", "right", "error"),
    [
        ("slots", (0, FIRST_SLOT._replace(port=1)), (0, FIRST_SLOT), "netfilter does not"),
        ("backend_slots", (1, 1), (1, 0), "backend 1 of service 1 is lost"),
        (
            "removed_cluster_ips",
            frontend(1).address,
            (frontend(1).address, 1),
            "cluster IP is lost",
        ),
    ],
)
def test_wrong_for_a_moment(case: str, wrong: Any, right: Any, error: str) -> None:
    """An entry that is wrong between two writes is noticed."""
    node = served()
    part = case.removeprefix("removed_")
    with pytest.raises(WrongLookup, match=error):
        node.write_rows([(case, wrong), (part, right)])


def restricted(service: str) -> DesiredService:
    return desired(service, [1], [1], source_ranges=[FIRST], flags=RESTRICTED)


@pytest.mark.parametrize("order", [late("source_ranges"), early("removed_source_ranges")])
def test_ranges_on_the_wrong_side_of_the_flip(order: Callable[[list[Write]], list[Write]]) -> None:
    """The oracle notices that a client that is admitted before and after is refused in between."""
    node = PlannedNode()
    node.change(by_name(restricted("db")))
    plan = node.planner.plan_changes({name("db"): None, **by_name(restricted("web"))}, node.now)
    with pytest.raises(WrongLookup, match=r"192\.0\.2\.1 may not use"):
        node.write_rows(order(list(writes(plan))))


def test_range_that_nobody_asked_for() -> None:
    """The oracle notices that a range admits a client in between that is never to be admitted."""
    node = PlannedNode()
    node.change(by_name(restricted("web")))
    key = source_range_key(SECOND, 1)
    with pytest.raises(WrongLookup, match=r"192\.0\.2\.200 may use"):
        node.write_rows([("source_ranges", (key, 1)), ("removed_source_ranges", key)])


@pytest.mark.parametrize(
    ("case", "row"),
    [
        ("source_ranges", (source_range_key(FIRST, 9), 1)),
        ("cluster_ips", (NOBODYS, 1)),
        ("service_names", (7, name("ghost"))),
    ],
)
def test_leaked_entry(case: str, row: object) -> None:
    """A source range, a cluster IP or a name without an owner is noticed."""
    node = served()
    node.maps.write(case, row)
    with pytest.raises(AssertionError):
        check_tidy(node)


def test_leaked_range() -> None:
    """A slot that is neither free, used nor in quarantine is noticed."""
    node = served()
    node.planner.slots.mark_used(Range(9, 1))
    with pytest.raises(AssertionError):
        check_tidy(node)


def test_crash_without_mending() -> None:
    """A planner that ignores a partial plan leaves backend_slots wrong, which is noticed."""
    node = served()
    node.change(by_name(CHANGED), stop=len(CHANGED.backends) + 1)
    node.desired = by_name(WEB)
    contents = node.maps.read_back()
    contents.wrong_backend_slots.clear()
    node.planner = Planner(CAPACITY, contents)
    node.write_rows(list(writes(node.planner.plan_everything(node.desired, node.now))))
    with pytest.raises(AssertionError):
        check_tidy(node)
