# SPDX-License-Identifier: Apache-2.0
"""The maps that the agent writes, read once: the other maps refer to their entries by number.

Also how names, addresses and times are formatted, the same way in every row.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.datapath.maps.records import ServiceCounters
from ebpflb.model.addresses import Address
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.entries import Backend, BackendName, Frontend, ServiceEntry

Row = dict[str, Any]


@dataclass(frozen=True)
class Snapshot:
    """The open maps, and the entries of those that the agent writes."""

    maps: Mapping[str, Map]
    services: dict[Frontend, ServiceEntry]
    service_names: dict[int, PortName]
    backend_names: dict[int, BackendName]
    slots: dict[int, Backend]  # only those that belong to a service

    @classmethod
    def read(cls, maps: Mapping[str, Map]) -> "Snapshot":
        services = dict(maps["services"].items())
        blocks = {service.block for service in services.values()}
        slots = {i: maps["slots"].get(i) for b in blocks for i in range(b.base, b.base + b.size)}
        return cls(
            maps,
            services,
            dict(maps["service_names"].items()),
            dict(maps["backend_names"].items()),
            slots,
        )

    def service(self, number: int) -> str:
        return service_name(self.service_names.get(number), number)

    def backends(self) -> dict[int, Backend]:
        return {backend.id: backend for backend in self.slots.values()}

    def service_counters(self, number: int) -> Row:
        return dict(
            zip(ServiceCounters._fields, self.maps["service_stats"].get(number), strict=True)
        )

    def backend_counters(self, number: int) -> Row:
        opened, closed = self.maps["backend_stats"].get(number)
        return {"opened": opened, "open": max(0, opened - closed)}


def service_name(name: PortName | None, number: int) -> str:
    """NAMESPACE/NAME:PORT/PROTOCOL, or #ID if the id has no name; "" for the id 0, no service."""
    return f"{name}/{Protocol(name.protocol).name}" if name else f"#{number}" if number else ""


def endpoint(backends: Mapping[int, Backend], number: int) -> str:
    backend = backends.get(number)
    removed = f"removed (#{number})" if number else ""
    return host_port(backend.address, backend.port) if backend else removed


def seconds_since(timestamp: int) -> float:
    """``timestamp`` is in nanoseconds of CLOCK_MONOTONIC."""
    return round((time.monotonic_ns() - timestamp) / 1e9, 1)


def host_port(address: Address, port: int) -> str:
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def kind(frontend: Frontend, service: ServiceEntry) -> str:
    """The kind of the frontend's address, in Kubernetes' words."""
    if frontend.address.is_unspecified:
        return "NodePort"
    if "load_balancer" in service.flags:
        return "LoadBalancer"
    return "ExternalIP" if "external" in service.flags else "ClusterIP"
