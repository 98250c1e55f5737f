# SPDX-License-Identifier: Apache-2.0
"""The map entries that the agent writes, as values; named and ordered as in bpf/layout.h.

Flags are sets of words: ``SERVICE_EXTERNAL`` in C is ``"external"`` here. datapath.layout packs
these values into the structs and refuses to start if the two disagree about a field.
"""

from array import array
from collections.abc import Iterator
from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address
from typing import NamedTuple

from ebpflb.model.addresses import Address
from ebpflb.model.endpoint_slices import EndpointName
from ebpflb.model.udp_timeouts import KERNEL_UDP_STREAM_TIMEOUT, KERNEL_UDP_TIMEOUT
from ebpflb.model.weights import DEFAULT_WEIGHT

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
