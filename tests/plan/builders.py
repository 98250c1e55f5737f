# SPDX-License-Identifier: Apache-2.0
"""Small desired service ports; a test gives only the values that matter to it."""

from collections.abc import Iterable, Mapping
from ipaddress import IPv4Address, ip_network

from ebpflb.entries.services import BackendName, Flags, Frontend
from ebpflb.model.addresses import Address, Family, Network
from ebpflb.model.annotations import DEFAULT_WEIGHT
from ebpflb.model.api_servers import NO_API_PLACES, ApiPlaces
from ebpflb.model.endpoints import Selection, finished
from ebpflb.model.nodes import Rules
from ebpflb.model.services import PortName, Protocol, ServicePort
from ebpflb.plan.allocators import Capacity
from ebpflb.plan.desired import DesiredBackend, DesiredService, desiring

CAPACITY = Capacity(  # nothing gets full
    services=64, slots=1024, service_ids=256, backend_ids=1024, source_ranges=64, choices=4096
)

CLUSTER = frozenset({"cluster"})
BOTH = frozenset({"cluster", "local"})
LOCAL = frozenset({"local"})
SERVING = frozenset[str]()
BLOCK_ORDER = (CLUSTER, BOTH, LOCAL, SERVING)

EXTERNAL = frozenset({"endpoints", "external"})
RESTRICTED = EXTERNAL | {"restricted"}
CLIENTS = (IPv4Address("192.0.2.1"), IPv4Address("192.0.2.200"), IPv4Address("198.51.100.1"))
FIRST, SECOND, BOTH_HALVES, THIRD = map(
    ip_network, ("192.0.2.0/25", "192.0.2.128/25", "192.0.2.0/24", "198.51.100.0/24")
)  # whom of the clients they hold


def name(service: str) -> PortName:
    return PortName("shop", service, "", Protocol.TCP, Family.IPV4)


def frontend(number: int) -> Frontend:
    return Frontend(IPv4Address(f"172.30.0.{number}"), 80, Protocol.TCP)


def backend(number: int, flags: Flags = CLUSTER, weight: int = DEFAULT_WEIGHT) -> DesiredBackend:
    label = BackendName("node-a", f"pod-{number}")
    return DesiredBackend(IPv4Address(f"10.1.0.{number}"), 8080, flags, label, weight)


def desired_service(
    port: ServicePort,
    selection: Selection,
    primary: Mapping[Family, Address] = {},
    node_local: Address | None = None,
    untracked: Rules | None = None,
    api: ApiPlaces = NO_API_PLACES,
) -> DesiredService:
    """Return the result of ``desiring``, without its steps."""
    return finished(desiring(port, selection, primary, node_local, untracked or Rules(), api))


def desired(
    service: str,
    frontends: Iterable[int] | Mapping[Frontend, Flags],
    backends: Iterable[int | DesiredBackend] = (),
    *,
    created: str = "2025",
    affinity_seconds: int = 0,
    source_ranges: Iterable[Network] = (),
    flags: Flags = frozenset({"endpoints"}),
) -> DesiredService:
    """Return a service port with frontends and backends by number, or in full."""
    if not isinstance(frontends, Mapping):
        frontends = {frontend(number): flags for number in frontends}
    return DesiredService(
        name=name(service),
        created=created,
        frontends=dict(frontends),
        affinity_seconds=affinity_seconds,
        backends=tuple(backend(b) if isinstance(b, int) else b for b in backends),
        source_ranges=tuple(source_ranges),
    )


def by_name(*ports: DesiredService) -> dict[PortName, DesiredService]:
    return {port.name: port for port in ports}
