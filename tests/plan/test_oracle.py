# SPDX-License-Identifier: Apache-2.0
"""The properties are alive: what breaks the rules on purpose is noticed."""

from collections.abc import Callable

import pytest

from ebpflb.plan.desired import DesiredService
from ebpflb.plan.entries import Range, Translation, source_range_key
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


def test_rules_kept() -> None:
    """The histories of this file pass as long as no rule is broken."""
    node = served()
    node.change(by_name(CHANGED))
    node.change(by_name(desired("web", [1, 2], [5])))
    check_tidy(node)


def test_without_quarantine() -> None:
    """A block that is used again at once is overwritten under a reader."""
    node = served()
    node.change(by_name(CHANGED))
    node.planner.quarantine.release(node.now + 1)
    with pytest.raises(WrongLookup, match="overwritten under a reader"):
        node.change(by_name(desired("web", [1, 2], [5])))


def test_without_quarantine_for_another_service() -> None:
    """A reader finds another service's slots where its own came back too early."""
    node = served()
    node.change({name("web"): None})
    node.planner.quarantine.release(node.now + 1)
    with pytest.raises(WrongLookup, match="under a reader"):
        node.change(by_name(desired("db", [3], [5])))


def test_translated_too_late() -> None:
    """A backend that can be chosen before netfilter has its endpoint gets no packets."""
    node = served()
    plan = node.planner.plan_changes(by_name(CHANGED), node.now)
    with pytest.raises(WrongLookup, match="netfilter does not translate"):
        node.write_rows(sorted(writes(plan), key=lambda row: row[0] == "translations"))


def test_translation_removed_too_early() -> None:
    """A program that had chosen a backend finds that netfilter has lost it."""
    node = served()
    rows = list(writes(node.planner.plan_changes(by_name(CHANGED), node.now)))
    with pytest.raises(WrongLookup, match="overwritten under a reader"):
        node.write_rows([*rows, ("removed_translations", TRANSLATION)])


def reverse(rows: list[Write]) -> list[Write]:
    return rows[::-1]


def services_first(rows: list[Write]) -> list[Write]:
    return sorted(rows, key=lambda row: row[0] != "services")


@pytest.mark.parametrize("order", [reverse, services_first])
def test_services_before_their_slots(order: Callable[[list[Write]], list[Write]]) -> None:
    """A frontend that flips before its slots are written leads nowhere."""
    node = served()
    plan = node.planner.plan_changes(by_name(CHANGED), node.now)
    with pytest.raises(WrongLookup, match="service 1 reads"):
        node.write_rows(order(list(writes(plan))))


def test_gone_too_early() -> None:
    """A frontend that moves must not be taken away before it is written."""
    node = served()
    plan = node.planner.plan_changes(by_name(CHANGED), node.now)
    with pytest.raises(WrongLookup, match="meanwhile"):
        node.write_rows([("removed_services", frontend(1)), *writes(plan)])


def test_former_backend_still_found() -> None:
    """A member that is not taken away leads its clients to a backend that left."""
    node = served()
    plan = node.planner.plan_changes(by_name(CHANGED), node.now)
    plan.removed_backend_slots.clear()
    node.write_rows(list(writes(plan)))
    with pytest.raises(AssertionError):
        check_tidy(node)


def test_slots_in_place() -> None:
    """A live range that is written changes what a frontend leads to in the middle."""
    node = served()
    slot, backend = 0, node.maps.slots[0]
    with pytest.raises(WrongLookup):
        node.write_rows([("slots", (slot, backend._replace(port=1))), ("slots", (slot, backend))])


def test_kept_backend_lost() -> None:
    """A member that points elsewhere for a moment loses its clients."""
    node = served()
    with pytest.raises(WrongLookup, match="backend 1 of service 1 is lost"):
        node.write_rows([("backend_slots", (1, 1)), ("backend_slots", (1, 0))])


def restricted(service: str) -> DesiredService:
    return desired(service, [1], [1], source_ranges=[FIRST], flags=RESTRICTED)


def ranges_last(rows: list[Write]) -> list[Write]:
    return sorted(rows, key=lambda row: row[0] == "source_ranges")


def gone_ranges_first(rows: list[Write]) -> list[Write]:
    return sorted(rows, key=lambda row: row[0] != "removed_source_ranges")


@pytest.mark.parametrize("order", [ranges_last, gone_ranges_first])
def test_ranges_on_the_wrong_side_of_the_flip(order: Callable[[list[Write]], list[Write]]) -> None:
    """A client that may come before and after is refused in between."""
    node = PlannedNode()
    node.change(by_name(restricted("db")))
    plan = node.planner.plan_changes({name("db"): None, **by_name(restricted("web"))}, node.now)
    with pytest.raises(WrongLookup, match=r"192\.0\.2\.1 may not use"):
        node.write_rows(order(list(writes(plan))))


def test_range_that_nobody_asked_for() -> None:
    """A client that may not come before nor after is let in by a range in between."""
    node = PlannedNode()
    node.change(by_name(restricted("web")))
    key = source_range_key(SECOND, 1)
    with pytest.raises(WrongLookup, match=r"192\.0\.2\.200 may use"):
        node.write_rows([("source_ranges", (key, 1)), ("removed_source_ranges", key)])


def test_cluster_ip_lost() -> None:
    """A cluster IP that is away for a moment is noticed."""
    node = served()
    ip = frontend(1).address
    with pytest.raises(WrongLookup, match="cluster IP is lost"):
        node.write_rows([("removed_cluster_ips", ip), ("cluster_ips", (ip, 1))])


def test_cluster_ip_too_early() -> None:
    """A cluster IP that comes before its frontends is noticed: their clients would be refused."""
    node = PlannedNode()
    plan = node.change(by_name(desired("web", [1], [1])), stop=0)
    rows = sorted(writes(plan), key=lambda row: row[0] == "services")
    with pytest.raises(WrongLookup, match="is refused meanwhile"):
        node.write_rows(rows)


@pytest.mark.parametrize(
    ("part", "key"), [("source_ranges", source_range_key(FIRST, 9)), ("cluster_ips", NOBODYS)]
)
def test_leaked_entry(part: str, key: object) -> None:
    """A range of no service and a cluster IP without frontend are noticed."""
    node = served()
    node.maps.write(part, (key, 1))
    with pytest.raises(AssertionError):
        check_tidy(node)


def test_leaked_name() -> None:
    """A leftover name is noticed."""
    node = served()
    node.maps.service_names[7] = name("ghost")
    with pytest.raises(AssertionError):
        check_tidy(node)


def test_leaked_range() -> None:
    """A slot that is neither free nor used nor resting is noticed."""
    node = served()
    node.planner.slots.mark_used(Range(9, 1))
    with pytest.raises(AssertionError):
        check_tidy(node)


def test_crash_without_mending() -> None:
    """A planner that does not know of half a plan leaves backend_slots wrong."""
    node = served()
    node.change(by_name(CHANGED), stop=len(CHANGED.backends) + 1)
    node.desired = by_name(WEB)
    contents = node.maps.read_back()
    contents.wrong_backend_slots.clear()
    node.planner = Planner(CAPACITY, contents)
    node.write_rows(list(writes(node.planner.plan_everything(node.desired, node.now))))
    with pytest.raises(AssertionError):
        check_tidy(node)
