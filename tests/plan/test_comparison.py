# SPDX-License-Identifier: Apache-2.0
"""Comparisons of maps with the plan: each entry that differs, and the row that corrects it."""

from collections.abc import Callable, Iterator
from ipaddress import ip_network
from typing import Any

import pytest

from ebpflb.model.events import Part
from ebpflb.plan import comparison
from ebpflb.plan.comparison import DIFFERS, MISSING, Wrong
from ebpflb.plan.planner import Plan, Planner
from tests.plan.builders import CAPACITY, by_name, desired, name
from tests.plan.simulation import Maps


class World:
    """A planner, and the maps as its plans have left them, until a test changes them."""

    def __init__(self) -> None:
        self.planner, self.maps = Planner(CAPACITY), Maps()
        self.plan(desired("a", [1, 2], [1, 2]), desired("b", [3]))

    def plan(self, *services: Any) -> None:
        self.write(self.planner.plan_changes(by_name(*services), 0.0))
        self.planner.written(0.0)

    def write(self, plan: Plan) -> None:
        self.maps.write_all(plan)

    @property
    def read(self) -> dict[str, Callable[[Any], Any]]:
        tables = [table for table in vars(self.maps) if table != "source_ranges"]
        return {each: getattr(self.maps, each).get for each in tables}

    def wrong(self) -> list[Wrong]:
        return list(self._wrong())

    def _wrong(self) -> Iterator[Wrong]:
        for service in self.planner.actual:
            found = comparison.compare_service(self.planner, service, self.read)
            yield from filter(None, found)
        for table in ("services", "service_names", "backend_names", "cluster_ips"):
            yield from comparison.surplus(self.planner, table, list(getattr(self.maps, table)))
        planned, ranges = self.planner.source_ranges.snapshot(), self.maps.source_ranges
        yield from comparison.present_source_ranges(self.planner, ranges)
        yield from comparison.missing_source_ranges(self.planner, planned, ranges.keys())
        slots = self.maps.backend_slots.items()
        yield from comparison.removed_backends(self.planner, slots)


@pytest.fixture
def world() -> World:
    return World()


@pytest.mark.parametrize(
    "table", ["services", "backend_slots", "service_names", "backend_names", "slots", "cluster_ips"]
)
@pytest.mark.parametrize("how", [MISSING, DIFFERS])
def test_a_row_corrects_only_its_entry(world: World, table: str, how: str) -> None:
    """A missing or different entry is found by its key, and its row corrects only that entry."""
    entries = getattr(world.maps, table)
    key, before = next(iter(entries.items()))
    if how == MISSING:
        del entries[key]
    else:
        entries[key] = "something else"
    (found,) = world.wrong()
    assert (found.field, found.row, found.found) == (table, (key, before), how)
    assert found.drift.part is Part.MAP
    assert found.drift.name.startswith(f"map {table}: ")
    world.write(comparison.corrections([found]))
    assert world.wrong() == []


def test_a_slot_of_no_backend_goes(world: World) -> None:
    """A slot of no backend is removed, because clients' affinity to a removed backend would lead to
    another backend's slot.
    """
    world.maps.backend_slots[99] = 1
    (found,) = world.wrong()
    assert (found.field, found.row) == ("removed_backend_slots", 99)


def test_planned_anew_meanwhile(world: World) -> None:
    """An entry that was planned after a comparison began is no drift."""
    found = comparison.compare_service(world.planner, name("a"), world.read)
    assert next(found) is None
    world.plan(desired("a", [1, 2], [9]))
    assert list(found) == []


def test_a_source_range_that_is_missing_is_found_when_all_are_read(world: World) -> None:
    """A missing source range is found when all are read, unless a range was removed during the
    reading.

    In that case a range may have been added again at a place that was already read.
    """
    network = ip_network("192.0.2.0/24")
    flags = frozenset({"endpoints", "external", "restricted"})
    world.plan(desired("r", [7], [7], source_ranges=[network], flags=flags))
    planned = world.planner.source_ranges.snapshot()
    missing = comparison.missing_source_ranges
    assert [each.row[0] for each in missing(world.planner, planned, set())] == list(planned.ranges)
    assert planned.ranges
    world.write(world.planner.plan_changes({name("r"): None}, 1.0))
    assert list(missing(world.planner, planned, set())) == []
