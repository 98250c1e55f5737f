# SPDX-License-Identifier: Apache-2.0
"""A service port and its selection -> the desired frontends and backends, still without ids.

The backends are in the order of their slots: those of the cluster list only, those of both lists,
those of the local list only, and last those that serve only the flows that they have. So each list
is one range of slots, and a backend has one slot even if it is in both lists. Whether its endpoint
is on this node does not matter to the order.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Address, IPv6Address, ip_network
from itertools import product

from msgspec import Struct

from ebpflb.model.addresses import Address, Family, Network
from ebpflb.model.selection import Selection
from ebpflb.model.services import PortName, ServicePort
from ebpflb.model.weights import DEFAULT_WEIGHT
from ebpflb.plan import scheduling
from ebpflb.plan.entries import BackendName, Flags, Frontend

ANY: dict[Family, Address] = {
    Family.IPV4: IPv4Address(0),
    Family.IPV6: IPv6Address(0),
}  # a NodePort's address

_LISTS = {  # (in the cluster list, in the local list): in the order of a block
    (True, False): frozenset({"cluster"}),
    (True, True): frozenset({"cluster", "local"}),
    (False, True): frozenset({"local"}),
    (False, False): frozenset[str](),
}
_HERE = {True: frozenset({"here"}), False: frozenset[str]()}
_FLAGS = {(*lists, here): _LISTS[lists] | _HERE[here] for lists, here in product(_LISTS, _HERE)}
_ORDER = {flags: list(_LISTS).index(key[:2]) for key, flags in _FLAGS.items()}
_NO_ADDRESSES: Mapping[Family, Address] = {}


class DesiredBackend(Struct, frozen=True, gc=False):
    """An endpoint as it will stand in its slot."""

    address: Address
    port: int
    flags: Flags
    name: BackendName
    weight: int = DEFAULT_WEIGHT

    @property
    def endpoint(self) -> tuple[Address, int]:
        """What identifies the backend: it keeps its id as long as the service has this endpoint."""
        return self.address, self.port


@dataclass(frozen=True, slots=True)
class DesiredService:
    """What the maps should hold for one service port.

    ``created`` decides which service port gets a frontend that several claim (see ``Claims``).
    ``source_ranges`` and ``nodeport_source_ranges`` are the clients that "restricted" VIPs and a
    "restricted" NodePort admit.
    """

    name: PortName
    created: str
    frontends: dict[Frontend, Flags]
    affinity_seconds: int
    backends: tuple[DesiredBackend, ...]
    source_ranges: tuple[Network, ...] = ()
    nodeport_source_ranges: tuple[Network, ...] = ()


def desired_service(
    port: ServicePort, selection: Selection, primary: Mapping[Family, Address] = _NO_ADDRESSES
) -> DesiredService:
    """What the maps should hold for ``port``; ``primary`` are this node's own addresses."""
    return DesiredService(
        name=port.name,
        created=port.created,
        frontends=_frontends(port, selection.has_any),
        affinity_seconds=port.affinity_seconds,
        backends=_backends(selection),
        source_ranges=_source_ranges(port, primary.get(port.name.family)),
        nodeport_source_ranges=port.nodeport_source_ranges if port.node_port else (),
    )


def _frontends(port: ServicePort, has_any: bool) -> dict[Frontend, Flags]:
    """The cluster IP is added last, and so replaces an equal external address."""
    protocol, usual = int(port.name.protocol), (port.scheduler, has_any)
    external = _flags(*usual, "external", "local" * port.external_local)
    found = {Frontend(ip, port.port, protocol): external for ip in port.external_ips}
    if port.load_balancer_ips:
        restricted = "restricted" * bool(port.source_ranges)
        balanced = external | _flags(*usual, "load_balancer", restricted)
        found |= {Frontend(ip, port.port, protocol): balanced for ip in port.load_balancer_ips}
    if port.node_port:
        restricted = "restricted" * bool(port.nodeport_source_ranges)
        nodeport = external | _flags(*usual, "nodeport", restricted)
        found[Frontend(ANY[port.name.family], port.node_port, protocol)] = nodeport
    internal = _flags(*usual, "local" * port.internal_local)
    found[Frontend(port.cluster_ip, port.port, protocol)] = internal
    return found


@cache
def _flags(scheduler: str, has_any: bool, *words: str) -> Flags:
    """Those of every frontend, and these words, without "": one set for all services."""
    endpoints = {"endpoints"} if has_any else set()
    return scheduling.flags_of(scheduler) | endpoints | (set(words) - {""})


def _source_ranges(port: ServicePort, own: Address | None) -> tuple[Network, ...]:
    """If the node's own address is admitted so are the VIPs: processes on this node connect to a
    VIP from that VIP, where it is assigned to the node (kube-proxy.md 7).
    """
    vips, ranges = port.load_balancer_ips, port.source_ranges
    if not (vips and ranges):
        return ()
    admitted = own is not None and any(own in network for network in ranges)
    return tuple(dict.fromkeys((*ranges, *(map(ip_network, vips) if admitted else ()))))


def _backends(selection: Selection) -> tuple[DesiredBackend, ...]:
    cluster, local = set(map(id, selection.cluster)), set(map(id, selection.local))
    found = {id(e): e for e in (*selection.serving, *selection.cluster, *selection.local)}
    backends = [
        DesiredBackend(
            e.address, e.port, _FLAGS[i in cluster, i in local, e.local], e.name, e.weight
        )
        for i, e in found.items()
    ]
    return tuple(sorted(backends, key=lambda backend: _ORDER[backend.flags]))
