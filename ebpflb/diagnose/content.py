# SPDX-License-Identifier: Apache-2.0
"""What the agent wrote into the maps, read once; the rows of every map refer to it by number."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ebpflb.datapath.maps import Map
from ebpflb.model.addresses import Address
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.entries import Backend, BackendName, Frontend, Service

Row = dict[str, Any]


@dataclass(frozen=True)
class Content:
    """What the agent wrote, read once; everything else refers to it by number."""

    maps: Mapping[str, Map]
    services: dict[Frontend, Service]
    service_names: dict[int, PortName]
    backend_names: dict[int, BackendName]
    slots: dict[int, Backend]  # those that a service names

    @classmethod
    def read(cls, maps: Mapping[str, Map]) -> "Content":
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
        name = self.service_names.get(number)
        return f"{name}/{Protocol(name.protocol).name}" if name else f"#{number}"

    def backends(self) -> dict[int, Backend]:
        return {backend.id: backend for backend in self.slots.values()}

    def service_counters(self, number: int) -> Row:
        chosen, sticky, refused, not_here = self.maps["service_stats"].get(number)
        return {"chosen": chosen, "sticky": sticky, "refused": refused, "not_here": not_here}

    def backend_counters(self, number: int) -> Row:
        opened, closed = self.maps["backend_stats"].get(number)
        return {"opened": opened, "open": max(0, opened - closed)}


def host_port(address: Address, port: int) -> str:
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def kind(frontend: Frontend, service: Service) -> str:
    """What kind of address a frontend is."""
    if frontend.address.is_unspecified:
        return "NodePort"
    if "load_balancer" in service.flags:
        return "LoadBalancer"
    return "ExternalIP" if "external" in service.flags else "ClusterIP"
