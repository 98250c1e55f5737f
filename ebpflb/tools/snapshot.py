# SPDX-License-Identifier: Apache-2.0
"""The maps that the agent writes, read once: the other maps refer to their entries by number.

Also how backends and times are formatted, the same way in every row.
"""

import time
from collections.abc import Mapping
from typing import Any

from msgspec import Struct

from ebpflb.kernel.map_writer import capacity_of
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.records import ServiceCounters
from ebpflb.kernel.valid_contents import ValidContents
from ebpflb.model.addresses import host_port
from ebpflb.model.services import PortName
from ebpflb.plan.entries import (
    Backend,
    BackendName,
    Frontend,
    ServiceEntry,
    service_name,
)

Row = dict[str, Any]


class Snapshot(Struct, frozen=True):
    """The open maps, and the entries of those that the agent writes."""

    maps: Mapping[str, Map]
    services: dict[Frontend, ServiceEntry]
    service_names: dict[int, PortName]
    backend_names: dict[int, BackendName]
    slots: dict[int, Backend]  # only those that belong to a service

    @classmethod
    def read(cls, maps: Mapping[str, Map]) -> "Snapshot":
        """What no agent can have written is logged and left out."""
        valid = ValidContents(maps, capacity_of(maps), repair=False)
        services = dict(valid.services())
        blocks = {service.block for service in services.values()}
        slots = {at: each for b in sorted(blocks) for at, each in enumerate(valid.slots(b), b.base)}
        return cls(maps, services, valid.service_names(), valid.backend_names(), slots)

    def service(self, number: int) -> str:
        return service_name(self.service_names.get(number), number)

    def backends(self) -> dict[int, Backend]:
        return {backend.id: backend for backend in self.slots.values()}

    def service_counters(self, number: int) -> Row:
        """Empty where the maps are those of the past, of which no counters are known."""
        if "service_stats" not in self.maps:
            return {}
        return dict(
            zip(ServiceCounters._fields, self.maps["service_stats"].get(number), strict=True)
        )

    def backend_counters(self, number: int) -> Row:
        if "backend_stats" not in self.maps:
            return {}
        opened, closed = self.maps["backend_stats"].get(number)
        return {"opened": opened, "open": max(0, opened - closed)}


def endpoint(backends: Mapping[int, Backend], number: int) -> str:
    backend = backends.get(number)
    removed = f"removed (#{number})" if number else ""
    return host_port(backend.address, backend.port) if backend else removed


def seconds_since(timestamp: int) -> float:
    """``timestamp`` is in nanoseconds of CLOCK_MONOTONIC."""
    return round((time.monotonic_ns() - timestamp) / 1e9, 1)
