# SPDX-License-Identifier: Apache-2.0
"""Compare the maps with the plan: the rows that correct each entry that differs.

Maps that the eBPF programs write (flows, affinity, sockets, counters) have no planned content. Each
entry is compared in one step, so the caller may change the plan between two steps: an entry that is
no longer planned is then skipped.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, NamedTuple

from ebpflb.entries.services import NO_SLOT, SourceRange
from ebpflb.model.events import Drift, Part
from ebpflb.model.services import PortName
from ebpflb.plan.frontends import SourceRangesSnapshot
from ebpflb.plan.planner import Plan, Planner
from ebpflb.plan.service_entries import ServiceEntries

Read = Mapping[str, Callable[[Any], Any]]


MISSING, DIFFERS, NOT_PLANNED = "is missing", "differs", "is not planned"


_REMOVED = "removed_"


class Wrong(NamedTuple):
    """An entry that differs from the plan; ``row`` of the Plan's ``field`` corrects it."""

    field: str
    row: Any
    found: str

    @property
    def drift(self) -> Drift:
        """The difference for the operator, by map and key."""
        key = self.row if self.field.startswith(_REMOVED) else self.row[0]
        name = self.field.removeprefix(_REMOVED)
        return Drift(Part.MAP, f"map {name}: {key_text(key)}", self.found)


def corrections(wrong: Iterable[Wrong]) -> Plan:
    """Return the plan that writes missing and different entries and removes unplanned ones."""
    plan = Plan()
    for each in wrong:
        getattr(plan, each.field).append(each.row)
    return plan


def compare_service(planner: Planner, name: PortName, read: Read) -> Iterator[Wrong | None]:
    """Compare each entry of a service port; yields None for an entry that is as planned."""
    entries = planner.actual.get(name)
    for found_row in _rows(name, entries) if entries else ():
        if planner.actual.get(name) is not entries or planner.is_ahead(name):
            return
        if isinstance(found_row, int):
            yield None
            continue
        field, row = found_row
        key, wanted = row
        if field == "services" and planner.holder(key) != name:
            continue
        found = read[field](key)
        if found == wanted:
            yield None
        else:
            yield Wrong(field, row, MISSING if found is None else DIFFERS)


def surplus(planner: Planner, name: str, keys: Iterable[Any]) -> Iterator[Wrong]:
    """Yield the keys of a map, read just now, that are not planned."""
    planned = _planned(planner)[name]
    for key in keys:
        if key not in planned:
            yield Wrong(f"{_REMOVED}{name}", key, NOT_PLANNED)


def present_source_ranges(planner: Planner, found: Mapping[SourceRange, int]) -> Iterator[Wrong]:
    """Yield the entries of map source_ranges, read just now, that differ from the plan."""
    yield from surplus(planner, "source_ranges", found)
    for range in planner.source_ranges.present & found.keys():
        if found[range] != 1:
            yield Wrong("source_ranges", (range, 1), DIFFERS)


def missing_source_ranges(
    planner: Planner, planned: SourceRangesSnapshot, seen: Set[Any]
) -> Iterator[Wrong]:
    """Yield the ranges that were planned when the reader began to read the map, but were not found.

    If any range was removed since then the result is unknown, so nothing is yielded: a range may
    have been removed and added again behind the reader.
    """
    if planner.source_ranges.removals == planned.removals:
        for range in planned.ranges:
            if range not in seen:
                yield Wrong("source_ranges", (range, 1), MISSING)


def removed_backends(planner: Planner, slots: Iterable[tuple[int, int]]) -> Iterator[Wrong]:
    """Yield the ids that have a slot in map backend_slots although no backend has the id.

    A slot of 0 is the initial value of the array.
    """
    for id, slot in slots:
        if slot not in (0, NO_SLOT) and not planner.knows_backend(id):
            yield Wrong("removed_backend_slots", id, NOT_PLANNED)


def _rows(name: PortName, entries: ServiceEntries) -> Iterator[tuple[str, tuple[Any, Any]] | int]:
    """Yield the entries in the order of Plan; a number while a table is being computed."""
    for slot in entries.slots():
        yield "slots", slot
    for pair in entries.backend_slots():
        yield "backend_slots", pair
    for table in (yield from entries.making_tables()):
        for place in table.rows():
            yield "choices", place
    yield "service_names", (entries.id, name)
    for id, backend in zip(entries.ids, entries.backends, strict=True):
        yield "backend_names", (id, backend.name)
    for frontend, service in entries.services.items():
        if "external" not in service.flags:
            yield "cluster_ips", (frontend.address, 1)
        yield "services", (frontend, service)


def _planned(planner: Planner) -> dict[str, Any]:
    """Map -> the keys that it may have, including ids in quarantine."""
    return {
        "services": planner.frontends.owners,
        "service_names": planner.service_ids,
        "backend_names": planner.backend_ids,
        "cluster_ips": planner.cluster_ips.counts,
        "source_ranges": planner.source_ranges.present,
    }


def key_text(key: Any) -> str:
    """A key as the operator sees it: an id with a #."""
    return f"#{key}" if isinstance(key, int) else str(key)
