# SPDX-License-Identifier: Apache-2.0
"""The map entries that the agent writes, as values; named and ordered as in bpf/layout.h.

Flags are sets of words: ``SERVICE_EXTERNAL`` in C is ``"external"`` here. kernel/maps/layout.py
packs these values into the structs and refuses to start if Python and C disagree about a field.
"""

from array import array
from collections.abc import Iterator, Mapping
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
NO_FLAGS: Flags = frozenset()

BackendName = EndpointName  # the endpoint that a backend id stands for

NAME_BYTES = 64  # of each part of a BackendName in a map (struct backend_name)
_MORE = "…"


def stored_name(name: EndpointName) -> BackendName:
    """The name as a map holds it: each part without a NUL; a part that is too long ends in "…"."""
    text = "".join(name)
    is_short = len(text) <= NAME_BYTES or max(map(len, name)) <= NAME_BYTES
    if is_short and text.isascii() and "\0" not in text:
        return name
    return BackendName(*(_cut(part) for part in name))


def _cut(part: str) -> str:
    text = part.partition("\0")[0]
    packed = text.encode()
    if len(packed) <= NAME_BYTES:
        return text
    return packed[: NAME_BYTES - len(_MORE.encode())].decode(errors="ignore") + _MORE


NO_SLOT = 2**32 - 1  # the slot of a removed backend: beyond the array, so a look-up finds nothing


class Frontend(NamedTuple):
    """The address of a service; for a NodePort the unspecified address of its family.

    With port 0 and protocol WHOLE it stands for the address itself (bpf/path/vip.h).
    """

    address: Address
    port: int
    protocol: int

    def __str__(self) -> str:
        if not self.port:
            return str(self.address)
        host = f"[{self.address}]" if self.address.version == 6 else str(self.address)
        return f"{host}:{self.port}"


class Range(NamedTuple):
    """A run of slots."""

    base: int
    size: int


NO_TABLE = Range(0, 0)


FIRST_BACKENDS = 10  # as in bpf/layout/service.h


class ServiceEntry(NamedTuple):
    """The value of a frontend; ``slots`` is the size of the block that starts at cluster.base.

    ``backends`` are the ids in the first FIRST_BACKENDS slots.
    """

    id: int
    flags: Flags
    affinity_seconds: int
    slots: int
    cluster: Range
    local: Range
    table: Range = NO_TABLE  # in map choices: of the cluster list; that of the local list follows
    backends: tuple[int, ...] = ()

    @property
    def tables(self) -> Range:
        """The range of both tables."""
        return Range(self.table.base, 2 * self.table.size)

    @property
    def block(self) -> Range:
        return Range(self.cluster.base, self.slots)


class Backend(NamedTuple):
    """One slot; a reader checks ``service`` and ``id`` to notice that the slot was reused."""

    address: Address
    port: int
    flags: Flags
    id: int
    service: int
    weight: int = DEFAULT_WEIGHT


class Translation(NamedTuple):
    """The address to which netfilter sends packets if the backend with this id was chosen."""

    id: int
    address: Address
    port: int


class Chosen(IntEnum):
    """The bits of skb->priority that tell netfilter the program's choice.

    They are enum chosen in bpf/layout/choice.h.
    """

    PREFIX = 0xEB000000
    MASK = 0xFF000000
    MASQUERADE = 0x00800000
    LIFTED = 0x00400000
    ID = 0x003FFFFF


CHOSEN_BAND, CHOSEN_LIFT = 15, 18


def id_of(chosen: int) -> int:
    """Return the backend's id in a choice."""
    id = chosen & Chosen.ID
    return id & (1 << CHOSEN_LIFT) - 1 | id >> CHOSEN_LIFT if chosen & Chosen.LIFTED else id


class BackendLoad(NamedTuple):
    """The number of open connections of a backend, for services that choose by it."""

    open: int = 0
    generation: int = 0
    uncounted: int = 0


class Choice(NamedTuple):
    """A place of a table.

    It leads to ``slot`` if a random 32-bit number is less than ``below``, else to ``other``.
    """

    slot: int
    other: int
    below: int


class Table(NamedTuple):
    """Consecutive places of map choices: the fields of one Choice after another."""

    first: int
    places: "array[int]"

    def rows(self) -> Iterator[tuple[int, Choice]]:
        """The places as entries of the map."""
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
    """Addresses reserved for services; ``length`` counts bits of the 128-bit address."""

    length: int
    address: Address


class DeviceEntry(NamedTuple):
    """The source addresses of masqueraded flows that leave by a device; unspecified means none.

    They are used if the kernel's route names no other address.
    """

    v4: Address
    v6: Address
    flags: Flags


class Prefix(NamedTuple):
    """The addresses that equal ``address`` under ``mask``, which is 128 bits for both families."""

    address: Address
    mask: Address


NO_PREFIX = Prefix(IPv6Address(1), IPv6Address(0))  # matches no address
NO_V4, NO_V6 = IPv4Address(0), IPv6Address(0)


class TimeoutKey(NamedTuple):
    """The state of a flow: the flags of its entries, without ``masquerade``.

    If ``request_flags`` lacks ``request``, only the reply's entry is left.
    """

    protocol: int
    is_stream: int
    request_flags: Flags
    reply_flags: Flags


class Timeout(NamedTuple):
    """After how many idle seconds another flow may take a flow's port.

    ``idle`` is the usual limit, ``kept`` the earliest one.
    """

    idle: int
    kept: int


class Settings(NamedTuple):
    """The operator's options, and the facts about this node that the agent found.

    ``span_v4`` and ``span_v6`` are the covering prefixes (see ``ClusterIps.cover``).
    """

    host_netns: int = 0
    writes: int = 0
    flags: Flags = NO_FLAGS
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
    last_service: int = 0
    last_backend: int = 0
    service_places: int = 0


class LastIds(NamedTuple):
    """The ids that were given last, in the settings; 0: not recorded, or none was given yet.

    A new agent continues after them. So an id that a client, socket or flow may remember is used
    again only after all others.
    """

    last_service: int = 0
    last_backend: int = 0


NOT_RECORDED = LastIds()


# How names and addresses are written for the operator, the same everywhere.

NODE_PORT = "NodePort"
LOOPBACK = "Loopback"  # --local-api-server
ADDRESS = "Address"  # --answer-pings, --load-balancer-unknown-ports
WHOLE = 1  # the protocol of an address as a whole: ICMP's number
_PROTOCOLS = frozenset(Protocol)


def service_name(name: PortName | None, number: int) -> str:
    """NAMESPACE/NAME:PORT/PROTOCOL, #ID if the id has no name, or "" for the id 0 (no service)."""
    return f"{name}/{protocol_name(name.protocol)}" if name else f"#{number}" if number else ""


def service_of(name: str) -> str:
    """Return NAMESPACE/NAME of a service port's ``service_name``."""
    return name.rpartition("/")[0].partition(":")[0]


def protocol_name(number: int) -> str:
    """The protocol's name, or its number if no agent or program writes such a protocol."""
    if number == WHOLE:
        return "ICMP"
    return Protocol(number).name if number in _PROTOCOLS else f"protocol {number}"


def frontend_kind(frontend: Frontend, flags: Flags) -> str:
    """The kind of the frontend's address, in Kubernetes' words if Kubernetes has it."""
    if not frontend.port:
        return ADDRESS
    if frontend.address.is_unspecified:
        return NODE_PORT
    if frontend.address.is_loopback:
        return LOOPBACK
    if "load_balancer" in flags:
        return "LoadBalancer"
    return "ExternalIP" if "external" in flags else "ClusterIP"


# Networks as keys and values of the maps, and the smallest prefix that holds several networks.
#
# All addresses in the maps have 128 bits: an IPv4 network of length n has the length 96 + n.

_BITS = 128


_SERVICE_BITS = 64


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


class CoveringPrefixes:
    """For each family, the smallest network that holds all addresses and networks ever added.

    ``by_family`` has its prefix; NO_PREFIX for a family without any address.
    """

    def __init__(self) -> None:
        self.networks: dict[Family, Network] = {}
        self.by_family: Mapping[Family, Prefix] = dict.fromkeys(Family, NO_PREFIX)
        self._known: object = None  # the last argument of ``add_all``

    def add_all(self, networks: frozenset[Network]) -> None:
        """Add networks; free of cost if this is the same set object as last time."""
        if networks is not self._known:
            for network in networks:
                self.add(network)
            self._known = networks

    def add(self, value: Address | Network) -> None:
        covering = self.networks.get(family(value))
        if covering and value in covering:  # nearly always
            return
        network = ip_network(value)
        covering = covering or network
        while not network.subnet_of(covering):  # type: ignore[arg-type]
            covering = covering.supernet()
        self.networks[family(value)] = covering
        self.by_family = {**self.by_family, family(value): prefix_of(covering)}


def _prefix_length(network: Network) -> int:
    return _BITS - network.max_prefixlen + network.prefixlen
