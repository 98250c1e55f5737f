# SPDX-License-Identifier: Apache-2.0
"""The frontends and endpoints whose requests ebpflb translates, found by what a rule names."""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from itertools import islice, product
from operator import itemgetter
from typing import NamedTuple

from ebpflb.diagnose.firewall.matches import (
    NO_ADDRESS_OR_PORT,
    AnyMatch,
    AnyOf,
    Match,
    Ranges,
    number,
)
from ebpflb.diagnose.snapshot import Snapshot, kind
from ebpflb.model.addresses import Address
from ebpflb.model.packet_mark import OFF, PacketMark
from ebpflb.model.packet_path import Engine
from ebpflb.model.services import Protocol
from ebpflb.plan.wording import host_port

NODEPORTS = range(30000, 32768)  # the API server's default --service-node-port-range
ADDRESS_FIELDS = frozenset(("address", "original_address", "reply_address"))  # fields of View
PORT_FIELDS = frozenset(("port", "original_port", "reply_port"))
_MOST_ADDRESSES = 64  # of the node, that a NodePort is tried at


class FrontendKind(Enum):
    """Of a frontend; the values are those of ``snapshot.kind``."""

    CLUSTER_IP = "ClusterIP"
    NODEPORT = "NodePort"
    EXTERNAL_IP = "ExternalIP"
    LOAD_BALANCER = "LoadBalancer"


_ORDER = (
    FrontendKind.NODEPORT,
    FrontendKind.LOAD_BALANCER,
    FrontendKind.EXTERNAL_IP,
    FrontendKind.CLUSTER_IP,
)


class TrafficEndpoint(NamedTuple):
    address: int
    port: int


UNKNOWN_ENDPOINT = TrafficEndpoint(NO_ADDRESS_OR_PORT, NO_ADDRESS_OR_PORT)


class TrafficFrontend(NamedTuple):
    """``title`` names it and its service, for the operator. ``needs_flows``: the flow tables serve
    it on either engine.
    """

    kind: FrontendKind
    address: int  # NOWHERE: any of the node's, for a NodePort
    port: int
    protocol: int
    family: int
    title: str
    endpoints: tuple[TrafficEndpoint, ...]
    needs_flows: bool = False


@dataclass(frozen=True)
class NodeState:
    """What is in force on the node, and its addresses: its own, and those that serve NodePorts."""

    engine: Engine
    own: frozenset[int]
    nodeports: dict[int, tuple[int, ...]]  # by family
    host_sockets: bool = False  # --socket-translation=host
    mark: PacketMark = OFF
    policy_marks: Collection[int] = ()  # marks by which routing rules choose a table


class Traffic:
    """All frontends, to be found by what is in the requests to them before and after translation.

    ``samples``: one of each kind, family and protocol, with one endpoint on the node itself and one
    elsewhere, for rules that name neither address nor port.
    """

    def __init__(self, frontends: Iterable[TrafficFrontend], node: NodeState) -> None:
        self.all = tuple(sorted(frontends, key=_outside_first))
        self.samples = tuple(_samples(self.all, node))
        self._node = node
        self._nodeports = tuple(f for f in self.all if f.address == NO_ADDRESS_OR_PORT)
        self._addresses = _Index((a, f) for f in self.all for a in _addresses(f))
        self._ports = _Index((p, f) for f in self.all for p in _ports(f))

    def named(self, matches: Collection[AnyMatch]) -> Iterator[TrafficFrontend]:
        """All that the matches can concern, and maybe more."""
        fields = [_named(match) for match in matches]
        address = next((r for f, r in fields if f in ADDRESS_FIELDS), None)
        port = next((r for f, r in fields if f in PORT_FIELDS), None)
        if port is not None and (address is None or _span(port) <= _span(address)):
            return self._ports.within(port)
        if address is not None:
            return self._at(address)
        return iter(self.all if _asks(matches, ADDRESS_FIELDS | PORT_FIELDS) else self.samples)

    def _at(self, address: Ranges) -> Iterator[TrafficFrontend]:
        yield from self._addresses.within(address)
        if any(each in address for family in self._node.nodeports.values() for each in family):
            yield from self._nodeports


class _Index:
    """Frontends by a number that one may have several of."""

    def __init__(self, entries: Iterable[tuple[int, TrafficFrontend]]) -> None:
        ordered = sorted(entries, key=itemgetter(0))
        self._keys = [key for key, _ in ordered]
        self._frontends = [frontend for _, frontend in ordered]

    def within(self, ranges: Ranges) -> Iterator[TrafficFrontend]:
        """Each once."""
        seen = set()
        for first, last in ranges.pairs:
            begin, end = bisect_left(self._keys, first), bisect_right(self._keys, last)
            for frontend in islice(self._frontends, begin, end):
                if id(frontend) not in seen:
                    seen.add(id(frontend))
                    yield frontend


def _outside_first(frontend: TrafficFrontend) -> tuple[int, ...]:
    """What clients outside ask comes first: of several, a finding names the first one."""
    order = _ORDER.index(frontend.kind)
    return order, frontend.family, frontend.port, frontend.address, frontend.protocol


def _addresses(frontend: TrafficFrontend) -> set[int]:
    return {frontend.address, *(each.address for each in frontend.endpoints)} - {NO_ADDRESS_OR_PORT}


def _ports(frontend: TrafficFrontend) -> set[int]:
    return {frontend.port, *(each.port for each in frontend.endpoints)} - {NO_ADDRESS_OR_PORT}


def _samples(frontends: Iterable[TrafficFrontend], node: NodeState) -> Iterator[TrafficFrontend]:
    seen = set()
    for frontend in frontends:
        for endpoint in frontend.endpoints:
            key = *frontend[:1], *frontend[3:5], endpoint.address in node.own
            if key not in seen:
                seen.add(key)
                yield frontend._replace(endpoints=(endpoint,))


def _span(ranges: Ranges) -> int:
    return sum(last - first + 1 for first, last in ranges.pairs)


def _asks(matches: Iterable[AnyMatch], fields: Collection[str]) -> bool:
    return any(
        isinstance(match, AnyOf) or (isinstance(match, Match) and match.field in fields)
        for match in matches
    )


def _named(match: AnyMatch) -> tuple[str, Ranges]:
    """The field and what it must be, where the match says so; else "" and nothing."""
    if isinstance(match, Match) and not match.negated:
        return match.field, match.ranges
    if isinstance(match, AnyOf) and not match.negated and all(match.choices):
        heads = [choice[0] for choice in match.choices]
        if len({head.field for head in heads}) == 1 and not any(head.negated for head in heads):
            return heads[0].field, Ranges(pair for head in heads for pair in head.ranges.pairs)
    return "", Ranges(())


def at_node(node: NodeState, frontend: TrafficFrontend) -> tuple[int, ...]:
    """The addresses at which a frontend is reached on this node."""
    if frontend.address >= 0:
        return (frontend.address,)
    return node.nodeports.get(frontend.family, ())[:_MOST_ADDRESSES]


def programmed(snapshot: Snapshot, *, sctp: bool) -> Iterator[TrafficFrontend]:
    """Those in the maps. Services without endpoints are not translated and left out.

    ``sctp``: whether the kernel's NAT can translate it.
    """
    backends: dict[int, list[TrafficEndpoint]] = {}
    for backend in snapshot.slots.values():
        endpoint = TrafficEndpoint(number(backend.address), backend.port)
        backends.setdefault(backend.service, []).append(endpoint)
    for frontend, service in snapshot.services.items():
        if service.id in backends:
            yield TrafficFrontend(
                FrontendKind(kind(frontend, service)),
                NO_ADDRESS_OR_PORT if frontend.address.is_unspecified else number(frontend.address),
                frontend.port,
                frontend.protocol,
                frontend.address.version,
                _title(snapshot.service(service.id), frontend.address, frontend.port),
                tuple(dict.fromkeys(backends[service.id])),
                "least_connections" in service.flags
                or (frontend.protocol == Protocol.SCTP and not sctp),
            )


def _title(service: str, address: Address, port: int) -> str:
    where = f"NodePort {port}" if address.is_unspecified else host_port(address, port)
    return f"{where} ({service})"


def expected() -> Iterator[TrafficFrontend]:
    """Where nothing is programmed yet: every NodePort that a service may get."""
    for port, protocol, family in product(NODEPORTS, (Protocol.TCP, Protocol.UDP), (4, 6)):
        yield TrafficFrontend(
            FrontendKind.NODEPORT,
            NO_ADDRESS_OR_PORT,
            port,
            protocol,
            family,
            f"NodePort {port}",
            (UNKNOWN_ENDPOINT,),
        )


def by_family(addresses: Iterable[Address]) -> dict[int, tuple[int, ...]]:
    """As ``Node.nodeports`` has them."""
    found = sorted(addresses, key=number)
    return {family: tuple(number(a) for a in found if a.version == family) for family in (4, 6)}
