# SPDX-License-Identifier: Apache-2.0
"""The map entries that the agent writes, as values; named and ordered as in bpf/layout.h.

Flags are sets of words: ``SERVICE_EXTERNAL`` in C is ``"external"`` here. kernel/maps/layout.py
packs these values into the structs and refuses to start if the two disagree about a field.
"""

from array import array
from collections.abc import Iterable, Iterator
from enum import IntEnum
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_network
from typing import NamedTuple

from ebpflb.model.addresses import Address, Family, Network, family
from ebpflb.model.annotations import DEFAULT_WEIGHT
from ebpflb.model.endpoint_slices import EndpointName
from ebpflb.model.packet_path import KERNEL_UDP_STREAM_TIMEOUT, KERNEL_UDP_TIMEOUT
from ebpflb.model.services import PortName, Protocol

Flags = frozenset[str]

BackendName = EndpointName  # what a backend id means

NO_SLOT = 2**32 - 1  # the slot of a removed backend: beyond the array, where nothing is found


class Frontend(NamedTuple):
    """Where a service is reached; a NodePort's address is its family's unspecified address."""

    address: Address
    port: int
    protocol: int

    def __str__(self) -> str:
        host = f"[{self.address}]" if self.address.version == 6 else str(self.address)
        return f"{host}:{self.port}"


class Range(NamedTuple):
    """A run of slots."""

    base: int
    size: int


NO_TABLE = Range(0, 0)


class ServiceEntry(NamedTuple):
    """What a frontend leads to: ``slots`` is the size of the block that starts at cluster.base."""

    id: int
    flags: Flags
    affinity_seconds: int
    slots: int
    cluster: Range
    local: Range
    table: Range = NO_TABLE  # of choices: the cluster list's; the local list's is behind it

    @property
    def tables(self) -> Range:
        """Both of them."""
        return self.table._replace(size=2 * self.table.size)

    @property
    def block(self) -> Range:
        return Range(self.cluster.base, self.slots)


class Backend(NamedTuple):
    """One slot; by ``service`` and ``id`` a reader notices that the slot was given to another."""

    address: Address
    port: int
    flags: Flags
    id: int
    service: int
    weight: int = DEFAULT_WEIGHT


class Translation(NamedTuple):
    """Where netfilter sends a packet for which the backend with this id was chosen."""

    id: int
    address: Address
    port: int


class Chosen(IntEnum):
    """The bits of skb->priority by which a program tells netfilter what it has chosen, as enum
    chosen in bpf/layout/choice.h.
    """

    PREFIX = 0xEB000000
    MASK = 0xFF000000
    MASQUERADE = 0x00800000
    KEEP_PORT = 0x00400000
    ID = 0x003FFFFF


class BackendLoad(NamedTuple):
    """How many open connections a backend has, of services that choose by it."""

    open: int = 0
    generation: int = 0
    uncounted: int = 0


class Choice(NamedTuple):
    """A place of a table: one slot where 32 random bits are less than ``below``, else the other."""

    slot: int
    other: int
    below: int


class Table(NamedTuple):
    """Places of map choices that follow each other: the fields of one Choice after the other."""

    first: int
    places: "array[int]"

    def rows(self) -> Iterator[tuple[int, Choice]]:
        """The same as entries of the map."""
        found = map(Choice, self.places[0::3], self.places[1::3], self.places[2::3])
        return enumerate(found, self.first)


class SourceRange(NamedTuple):
    """Clients that a service's restricted frontends admit.

    ``length`` counts bits: 32 of the service, 32 of ``nodeport`` and those of the 128-bit address.
    """

    length: int
    service: int
    nodeport: int  # 1: of its NodePort; 0: of its load balancer VIPs
    address: Address


class ServiceRange(NamedTuple):
    """Addresses that are given to services; ``length`` counts bits of the 128-bit address."""

    length: int
    address: Address


class RouteKey(NamedTuple):
    """Destinations of a device; ``length`` counts its 32 bits and those of the 128-bit address."""

    length: int
    ifindex: int
    destination: Address


class DeviceEntry(NamedTuple):
    """The addresses of masqueraded flows that leave by a device; unspecified: they cannot.

    They count where neither the kernel nor map route_sources names another one.
    """

    v4: Address
    v6: Address
    flags: Flags


class Prefix(NamedTuple):
    """The addresses that equal ``address`` under ``mask``, which is 128 bits for both families."""

    address: Address
    mask: Address


NO_PREFIX = Prefix(IPv6Address(1), IPv6Address(0))  # no address is ::1 under it
NO_V4, NO_V6 = IPv4Address(0), IPv6Address(0)


class TimeoutKey(NamedTuple):
    """How a flow stands, by the flags of its entries but ``masquerade``.

    Without ``request`` among those of the request, the reply's entry is alone.
    """

    protocol: int
    is_stream: int
    request_flags: Flags
    reply_flags: Flags


class Timeout(NamedTuple):
    """After how many seconds idle a flow loses its port to another: surely, and at the earliest."""

    idle: int
    kept: int


class Settings(NamedTuple):
    """What the operator chose, and what the agent found out about this node.

    ``span_v4`` and ``span_v6`` are the covering prefixes (see ``ClusterIps.cover``).
    """

    host_netns: int
    writes: int
    flags: Flags
    first_port: int = 0
    last_port: int = 0
    mark: int = 0
    mark_mask: int = 0
    pods_v4: Prefix = NO_PREFIX
    pods_v6: Prefix = NO_PREFIX
    span_v4: Prefix = NO_PREFIX
    span_v6: Prefix = NO_PREFIX
    node_v4: Address = NO_V4
    node_v6: Address = NO_V6
    frontend_moves: int = 0
    stream_after: int = 0
    udp_timeout: int = KERNEL_UDP_TIMEOUT
    udp_stream_timeout: int = KERNEL_UDP_STREAM_TIMEOUT


# How names and addresses are written for the operator, the same way everywhere.

NODE_PORT = "NodePort"
_PROTOCOLS = frozenset(Protocol)


def service_name(name: PortName | None, number: int) -> str:
    """NAMESPACE/NAME:PORT/PROTOCOL, or #ID if the id has no name; "" for the id 0, no service."""
    return f"{name}/{protocol_name(name.protocol)}" if name else f"#{number}" if number else ""


def service_of(name: str) -> str:
    """NAMESPACE/NAME of what ``service_name`` says of a service port."""
    return name.rpartition("/")[0].partition(":")[0]


def protocol_name(number: int) -> str:
    """Its number where no agent writes such a protocol, and no program."""
    return Protocol(number).name if number in _PROTOCOLS else f"protocol {number}"


def host_port(address: Address, port: int) -> str:
    return f"[{address}]:{port}" if address.version == 6 else f"{address}:{port}"


def frontend_kind(frontend: Frontend, flags: Flags) -> str:
    """The kind of the frontend's address, in Kubernetes' words."""
    if frontend.address.is_unspecified:
        return NODE_PORT
    if "load_balancer" in flags:
        return "LoadBalancer"
    return "ExternalIP" if "external" in flags else "ClusterIP"


# Networks as keys and values of the maps, and the smallest prefixes that hold many of them.
#
# All addresses in the maps have 128 bits: an IPv4 network of length n is one of length 96 + n.

_BITS = 128


_SERVICE_BITS = 64


_DEVICE_BITS = 32


@lru_cache(maxsize=256)
def prefix_of(network: Network) -> Prefix:
    """The network as an address and a mask of 128 bits."""
    ones = (1 << _BITS) - 1
    return Prefix(network.network_address, IPv6Address(ones ^ int(network.hostmask)))


def service_range(network: Network) -> ServiceRange:
    """The network as a key of map service_ranges."""
    return ServiceRange(_prefix_length(network), network.network_address)


def network_of(range: ServiceRange) -> Network | None:
    """The inverse of service_range; None for an entry that no agent can have written."""
    length = range.length - _BITS + range.address.max_prefixlen
    try:
        return ip_network((range.address, length))
    except ValueError:
        return None


def source_range_key(network: Network, service: int, *, nodeport: bool = False) -> SourceRange:
    """The network as a key of map source_ranges."""
    length = _SERVICE_BITS + _prefix_length(network)
    return SourceRange(length, service, int(nodeport), network.network_address)


def route_key(ifindex: int, network: Network) -> RouteKey:
    """The network as a key of map route_sources."""
    return RouteKey(_DEVICE_BITS + _prefix_length(network), ifindex, network.network_address)


def smallest_network(values: Iterable[Address | Network]) -> Network | None:
    """The smallest network that holds all values, which are of one family; None without values."""
    networks = [ip_network(value) for value in values]
    if not networks:
        return None
    low = min(networks, key=lambda network: int(network.network_address)).network_address
    high = max(int(network.broadcast_address) for network in networks)
    length = low.max_prefixlen - (int(low) ^ high).bit_length()
    return ip_network((low, length), strict=False)


class CoveringPrefixes:
    """For each family the smallest network that holds all addresses and networks ever added."""

    def __init__(self) -> None:
        self.networks: dict[Family, Network] = {}
        self._known: object = None  # what ``add_all`` was given last

    def add_all(self, networks: frozenset[Network]) -> None:
        """Costs nothing where it is the set that was given last."""
        if networks is not self._known:
            for network in networks:
                self.add(network)
            self._known = networks

    def add(self, value: Address | Network) -> None:
        before = self.networks.get(family(value))
        if before is None:
            self.networks[family(value)] = ip_network(value)
        elif value not in before:
            self.networks[family(value)] = smallest_network((before, value)) or before

    def by_family(self) -> dict[Family, Prefix]:
        """NO_PREFIX for a family of which nothing was added."""
        found = ((f, self.networks.get(f)) for f in Family)
        return {f: prefix_of(network) if network else NO_PREFIX for f, network in found}


def _prefix_length(network: Network) -> int:
    return _BITS - network.max_prefixlen + network.prefixlen
