# SPDX-License-Identifier: Apache-2.0
"""Services as pages: from the agent if one runs, else from the pinned maps alone.

Only the agent knows which endpoints are not used, and why. The maps have the counters.
"""

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from glob import escape
from typing import NamedTuple

from ebpflb.errors import NodeError, NotFound
from ebpflb.kernel.map_writer import capacity_of
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.records import BackendCounters, ServiceCounters
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.valid_contents import ValidContents
from ebpflb.model.services import PortName, likely_service
from ebpflb.options import Paths
from ebpflb.plan.service_entries import ServiceEntries
from ebpflb.plan.service_page import (
    ServiceList,
    ServicePage,
    ServiceRow,
    programmed_port,
    summary,
)
from ebpflb.tools import ask
from ebpflb.tools.ask import NoAnswer

_UNKNOWN = "unused endpoints and the reasons are unknown: {}; showing the maps"
_NO_LABELS = "{}: only the agent knows labels; without --selector the maps are shown"
_MOST_NAMED = 1000  # namespaces that have a Service of one name


class Wanted(NamedTuple):
    """Patterns of NAMESPACE/NAME as a shell has them, how many Services at most, and their labels
    as kubectl's -l has them.
    """

    patterns: tuple[str, ...]
    limit: int
    selector: str = ""


def page(paths: Paths, maps: Mapping[str, Map] | None, namespace: str, name: str) -> ServicePage:
    """Raises NotFound if there is no such Service, with the names that are most like it."""
    try:
        found = ask.service(paths, namespace, name)
    except NoAnswer as reason:
        found = _programmed_page(_readable(paths, maps), f"{namespace}/{name}")
        found.notes.append(_UNKNOWN.format(reason))
    if maps is not None:
        _count(found, maps)
    return found


def namespace_of(paths: Paths, maps: Mapping[str, Map] | None, name: str) -> str:
    """The only namespace that has a Service of this name; "default" if that is one of them, or none
    is. Raises NodeError if several others have.
    """
    found = listed(paths, maps, Wanted((f"*/{escape(name)}",), _MOST_NAMED)).services
    names = [row.service for row in found]
    if not names or f"default/{name}" in names:
        return "default"
    if len(names) > 1:
        raise NodeError(f"{name} is the name of several Services: {' or '.join(names)}?")
    return names[0].partition("/")[0]


def listed(paths: Paths, maps: Mapping[str, Map] | None, wanted: Wanted) -> ServiceList:
    """Sorted by name; ``more`` says how many match beyond the limit.

    Raises NodeError where nothing knows labels that are asked for.
    """
    try:
        found = ask.services(paths, wanted.patterns, wanted.selector, wanted.limit)
    except NoAnswer as reason:
        if wanted.selector:
            raise NodeError(_NO_LABELS.format(reason)) from None
        found = programmed_list(_readable(paths, maps), wanted)
        found.notes.append(_UNKNOWN.format(reason))
    if maps is not None and found.services:
        _count_rows(found.services, maps)
    return found


def _readable(paths: Paths, maps: Mapping[str, Map] | None) -> Mapping[str, Map]:
    if maps is None:
        raise NodeError(f"no agent answers, and {StateDir(paths.state).why_no_maps()}")
    return maps


def _programmed_page(maps: Mapping[str, Map], wanted: str) -> ServicePage:
    pages = _programmed(maps)
    if wanted not in pages:
        hint = likely_service(wanted, pages)
        raise NotFound(f"no Service {wanted} in the maps, and no agent answers: {hint}")
    return pages[wanted]


def programmed_list(maps: Mapping[str, Map], wanted: Wanted) -> ServiceList:
    pages = _programmed(maps)
    names = [
        name
        for name in sorted(pages)
        if any(fnmatchcase(name, pattern) for pattern in wanted.patterns)
    ]
    rows = [summary(pages[name]) for name in names[: wanted.limit]]
    return ServiceList(rows, len(names) - len(rows))


def _programmed(maps: Mapping[str, Map]) -> dict[str, ServicePage]:
    """By NAMESPACE/NAME."""
    pages: dict[str, ServicePage] = {}
    for name, entries in sorted(_entries(maps).items()):
        service = str(name.owner)
        page = pages.setdefault(service, ServicePage(service, []))
        page.ports.append(programmed_port(name, entries))
        page.ports[-1].endpoints.sort(key=lambda row: row.endpoint)
    return pages


def _entries(maps: Mapping[str, Map]) -> dict[PortName, ServiceEntries]:
    """Unlike the agent at its start, it removes nothing."""
    return ValidContents(maps, capacity_of(maps), repair=False).read_back().entries


def _count(page: ServicePage, maps: Mapping[str, Map]) -> None:
    for port in page.ports:
        if port.id:
            port.counters = ServiceCounters(*maps["service_stats"].get(port.id))._asdict()
        counts = _connections(maps, (row.id for row in port.endpoints if row.id))
        for row in port.endpoints:
            if row.id:
                row.opened, row.open = counts[row.id]


def _connections(maps: Mapping[str, Map], backends: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Opened by sockets, and still open; with least-connections those of packets are known too."""
    found, loads = {}, maps["backend_loads"]
    for id, counts in maps["backend_stats"].get_many({*backends}).items():
        counters, counted = BackendCounters(*counts), loads.get(id).open
        found[id] = counters.opened, max(counted, counters.opened - counters.closed, 0)
    return found


def _count_rows(rows: list[ServiceRow], maps: Mapping[str, Map]) -> None:
    """By the backends that the slots of their frontends hold."""
    backends = _backends(maps, {id for row in rows for id in row.ids})
    counts = _connections(maps, (backend for members in backends.values() for backend in members))
    for row in rows:
        own = [counts[backend] for id in row.ids for backend in backends[id]]
        row.opened, row.open = (sum(column) for column in zip((0, 0), *own, strict=True))


def _backends(maps: Mapping[str, Map], ids: set[int]) -> dict[int, set[int]]:
    """Service id -> the ids of its backends."""
    found: dict[int, set[int]] = {id: set() for id in ids}
    valid = ValidContents(maps, capacity_of(maps), repair=False)
    for _, entry in valid.services():
        if entry.id in found and not found[entry.id]:
            found[entry.id] = {backend.id for backend in valid.slots(entry.block)} - {0}
    return found
