# SPDX-License-Identifier: Apache-2.0
"""The maps that the agent writes: the other maps refer to their entries by number.

Also how full maps are, the format of backends and times in every row, and the error for an unknown
Service.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

import msgspec

from ebpflb.entries.services import (
    Backend,
    BackendName,
    Frontend,
    Range,
    ServiceEntry,
    service_name,
)
from ebpflb.errors import NotFound, one_line
from ebpflb.kernel.map_writer import capacity_of
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.records import ServiceCounters
from ebpflb.kernel.maps.sweep import FLOW_MAPS, FlowTable
from ebpflb.kernel.valid_contents import ValidContents
from ebpflb.model.addresses import host_port
from ebpflb.model.services import PortName, likely_service

Row = dict[str, Any]


class Snapshot:
    """The open maps, and the entries of the maps that the agent writes, read on first use.

    Invalid entries, which no agent can have written, are logged and left out.
    """

    def __init__(self, maps: Mapping[str, Map]) -> None:
        self.maps = maps
        self._valid = ValidContents(maps, capacity_of(maps), repair=False)

    @cached_property
    def services(self) -> dict[Frontend, ServiceEntry]:
        return dict(self._valid.items("services"))

    @cached_property
    def service_names(self) -> dict[int, PortName]:
        return dict(self._valid.items("service_names"))

    @cached_property
    def backend_names(self) -> Mapping[int, BackendName]:
        return self._valid.backend_names()

    @cached_property
    def slots(self) -> dict[int, Backend]:
        """The slots that belong to a service."""
        blocks = sorted({service.block for service in self.services.values()})
        return {at: each for b in blocks for at, each in enumerate(self._valid.slots(b), b.base)}

    def service(self, number: int) -> str:
        return service_name(self.service_names.get(number), number)

    @cached_property
    def backends(self) -> dict[int, Backend]:
        """The backends by their ids."""
        return {backend.id: backend for backend in self.slots.values()}

    def endpoint(self, number: int) -> str:
        """Return ADDRESS:PORT of the backend with this id."""
        if backend := self.backends.get(number):
            return host_port(backend.address, backend.port)
        return f"removed (#{number})" if number else ""

    def service_counters(self, number: int) -> Row:
        return ServiceCounters(*self.maps["service_stats"].get(number))._asdict()

    def backend_counters(self, number: int) -> Row:
        opened, closed = self.maps["backend_stats"].get(number)
        return {"opened": opened, "open": max(0, opened - closed)}


def services_at(maps: Mapping[str, Map], frontend: Frontend) -> Iterator[ServiceEntry]:
    """Yield the services of a frontend, by its address, and as a NodePort, which has none."""
    for where in (frontend, frontend._replace(address=type(frontend.address)(0))):
        if found := maps["services"].get(where):
            yield found


def require_service(maps: Mapping[str, Map], wanted: str) -> None:
    """Raise NotFound, with the most similar names, if no port of NAMESPACE/NAME is served here."""
    known = {str(name.owner) for _, name in maps["service_names"].items()}
    if wanted not in known:
        hint = likely_service(wanted, known)
        raise NotFound(f"no Service {one_line(wanted)} is served here: {hint}")


def seconds_since(timestamp: int) -> float:
    """Return the seconds since a timestamp, which is in nanoseconds of CLOCK_MONOTONIC."""
    return round((time.monotonic_ns() - timestamp) / 1e9, 1)


_COUNTED = ("services", "service_names", "backend_names", "source_ranges")


class MapFill(msgspec.Struct):
    """The number of entries in use, and ``limit``, the number that the map can hold."""

    name: str
    entries: int
    limit: int

    @property
    def share(self) -> float:
        """The used part of the map, from 0 to 1."""
        return self.entries / self.limit if self.limit else 0.0


def map_fill(maps: Mapping[str, Map]) -> list[MapFill]:
    """Return the fill of the maps that the agent plans, and of the flow tables at the last sweep.

    The fullest map is first. In arrays, only the elements that Services use are counted. Raises
    KernelError.
    """
    services = [entry for _, entry in maps["services"].items()]
    counts = {
        **{name: maps[name].count() for name in _COUNTED},
        "slots": _size(entry.block for entry in services),
        "choices": _size(entry.tables for entry in services),
        **{name: FlowTable(maps, name).numbers.entries for name in FLOW_MAPS},
    }
    found = [MapFill(name, count, maps[name].spec.entries) for name, count in counts.items()]
    return sorted(found, key=lambda fill: -fill.share)


def _size(ranges: Iterable[Range]) -> int:
    """Return the total size of all ranges; frontends of a service share a range."""
    return sum(each.size for each in set(ranges))
