# SPDX-License-Identifier: Apache-2.0
"""Small wanted service ports; a test states only what it is about."""

from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address

from ebpflb.model.addresses import Family
from ebpflb.model.services import PortName, Protocol
from ebpflb.plan.entries import BackendName, Flags, Frontend
from ebpflb.plan.planner import Capacity
from ebpflb.plan.wanted import Wanted, WantedBackend

ROOM = Capacity(services=64, slots=1024, service_ids=256, backend_ids=1024)  # nothing gets full

CLUSTER = frozenset({"cluster"})
BOTH = frozenset({"cluster", "local"})
LOCAL = frozenset({"local"})
SERVING = frozenset[str]()
BLOCK_ORDER = (CLUSTER, BOTH, LOCAL, SERVING)


def name(service: str) -> PortName:
    return PortName("shop", service, "", Protocol.TCP, Family.IPV4)


def frontend(number: int) -> Frontend:
    return Frontend(IPv4Address(f"172.30.0.{number}"), 80, Protocol.TCP)


def backend(number: int, flags: Flags = CLUSTER) -> WantedBackend:
    label = BackendName("node-a", f"pod-{number}")
    return WantedBackend(IPv4Address(f"10.1.0.{number}"), 8080, flags, label)


def wanted(
    service: str,
    frontends: Iterable[int] | Mapping[Frontend, Flags],
    backends: Iterable[int | WantedBackend] = (),
    *,
    created: str = "",
    affinity_seconds: int = 0,
    flags: Flags = frozenset({"endpoints"}),
) -> Wanted:
    """Frontends and backends by number, or in full."""
    if not isinstance(frontends, Mapping):
        frontends = {frontend(number): flags for number in frontends}
    return Wanted(
        name=name(service),
        created=created,
        frontends=dict(frontends),
        affinity_seconds=affinity_seconds,
        backends=tuple(backend(b) if isinstance(b, int) else b for b in backends),
    )


def by_name(*ports: Wanted) -> dict[PortName, Wanted]:
    return {port.name: port for port in ports}
