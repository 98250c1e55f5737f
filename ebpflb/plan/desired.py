# SPDX-License-Identifier: Apache-2.0
"""The desired content of the maps for a service port, before ids are allocated.

The backends are in the order of their slots: first those in the cluster list only, then those in
both lists, then those in the local list only, then those that serve only their existing flows, and
last the node-local listener, if one answers. So each list is one range of slots, and a backend in
both lists has one slot. The order does not depend on whether an endpoint is on this node.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from ipaddress import IPv4Address, IPv6Address, ip_network
from itertools import product

from msgspec import Struct

from ebpflb.model.addresses import Address, Family, Network
from ebpflb.model.annotations import DEFAULT_WEIGHT
from ebpflb.model.endpoints import Selection
from ebpflb.model.services import PortName, ServicePort
from ebpflb.model.untracked import NO_UNTRACKED, Untracked
from ebpflb.plan import tables
from ebpflb.plan.entries import (
    WHOLE,
    BackendName,
    Flags,
    Frontend,
    stored_name,
)

ANY: dict[Family, Address] = {
    Family.IPV4: IPv4Address(0),
    Family.IPV6: IPv6Address(0),
}  # the address of NodePort frontends

IN_LISTS = frozenset({"cluster", "local"})  # flags of backends that get new connections
_LISTS = {  # (in the cluster list, in the local list), in the order of a block
    (True, False): frozenset({"cluster"}),
    (True, True): IN_LISTS,
    (False, True): frozenset({"local"}),
    (False, False): frozenset[str](),
}
_NODE_LOCAL = frozenset({"node_local"})
_HERE = {True: frozenset({"here"}), False: frozenset[str]()}
_FLAGS = {(*lists, here): _LISTS[lists] | _HERE[here] for lists, here in product(_LISTS, _HERE)}
_ORDER = {flags: list(_LISTS).index(key[:2]) for key, flags in _FLAGS.items()}
_NO_ADDRESSES: Mapping[Family, Address] = {}
NODE_LOCAL = "node-local"  # the name of a listener, in the place of a pod's
_LISTENER = BackendName("", NODE_LOCAL, "")


class DesiredBackend(Struct, frozen=True, gc=False):
    """An endpoint as its slot will hold it."""

    address: Address
    port: int
    flags: Flags
    name: BackendName
    weight: int = DEFAULT_WEIGHT

    @property
    def endpoint(self) -> tuple[Address, int]:
        """The backend's identity: it keeps its id as long as the service has this endpoint."""
        return self.address, self.port


@dataclass(frozen=True, slots=True)
class DesiredService:
    """The desired map content for one service port.

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

    def serves(self, frontend: Frontend) -> bool:
        """Whether there is a backend at the frontend for clients outside."""
        wanted = "local" if "local" in self.frontends[frontend] else "cluster"
        return any(wanted in backend.flags for backend in self.backends)


def desired_service(
    port: ServicePort,
    selection: Selection,
    primary: Mapping[Family, Address] = _NO_ADDRESSES,
    node_local: Address | None = None,
    untracked: Untracked = NO_UNTRACKED,
) -> DesiredService:
    """Return the desired map content for ``port``; ``primary`` are this node's own addresses.

    ``node_local`` is the address of a listener that serves sockets; ``untracked`` is what rules in
    raw exempt.
    """
    backends = _backends(selection)
    listener = _listener(node_local, port.port, backends)
    frontends = _frontends(port, selection.has_any, has_listener=bool(listener))
    return DesiredService(
        name=port.name,
        created=port.created,
        frontends=_untracked(frontends, untracked),
        affinity_seconds=port.affinity_seconds,
        backends=backends + listener,
        source_ranges=_source_ranges(port, primary.get(port.name.family)),
        nodeport_source_ranges=port.nodeport_source_ranges if port.node_port else (),
    )


def _listener(
    address: Address | None, port: int, backends: tuple[DesiredBackend, ...]
) -> tuple[DesiredBackend, ...]:
    """Return the backend of a listener; none if an endpoint has its address and port."""
    if address is None or (address, port) in [each.endpoint for each in backends]:
        return ()
    return (DesiredBackend(address, port, _NODE_LOCAL, _LISTENER),)


def _untracked(frontends: dict[Frontend, Flags], untracked: Untracked) -> dict[Frontend, Flags]:
    """Mark the frontends whose packets rules in raw exempt."""
    if not untracked.destinations:
        return frontends
    return {
        frontend: flags | {"untracked"} if untracked.has(*frontend) else flags
        for frontend, flags in frontends.items()
    }


def _frontends(port: ServicePort, has_any: bool, *, has_listener: bool) -> dict[Frontend, Flags]:
    """Return the frontends.

    The cluster IP comes last, and so replaces an equal external address.
    """
    protocol, usual = int(port.name.protocol), (port.scheduler, has_any, has_listener)
    external = _flags(*usual, external=True, local=port.external_local)
    routed = external | _flags(*usual, passthrough=port.passthrough)
    found = {Frontend(ip, port.port, protocol): routed for ip in port.external_ips}
    if port.load_balancer_ips:
        restricted = bool(port.source_ranges)
        balanced = routed | _flags(*usual, load_balancer=True, restricted=restricted)
        found |= {Frontend(ip, port.port, protocol): balanced for ip in port.load_balancer_ips}
    if port.node_port:
        restricted = bool(port.nodeport_source_ranges)
        nodeport = external | _flags(*usual, nodeport=True, restricted=restricted)
        found[Frontend(ANY[port.name.family], port.node_port, protocol)] = nodeport
    if port.loopback:
        address, number = port.loopback
        found[Frontend(address, number, protocol)] = _flags(*usual, external=True)
    internal = _flags(*usual, local=port.internal_local)
    found[Frontend(port.cluster_ip, port.port, protocol)] = internal
    for address in port.whole_addresses:
        found[Frontend(address, 0, WHOLE)] = found[Frontend(address, port.port, protocol)]
    return found


@cache
def _flags(scheduler: str, has_any: bool, has_listener: bool, **further: bool) -> Flags:
    """Return the flags common to all frontends and the ones in ``further`` that are true.

    One shared set per result.
    """
    further |= {"endpoints": has_any, "node_local": has_listener}
    return tables.scheduler_flags(scheduler) | {it for it in further if further[it]}


def _source_ranges(port: ServicePort, own: Address | None) -> tuple[Network, ...]:
    """Return the admitted clients; if the node's own address is admitted, the VIPs are too.

    Processes on this node connect to a VIP from that VIP if it is assigned to the node
    (kube-proxy.md 7).
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
            e.address,
            e.port,
            _FLAGS[i in cluster, i in local, e.local],
            stored_name(e.name),
            e.weight,
        )
        for i, e in found.items()
    ]
    return tuple(sorted(backends, key=lambda backend: _ORDER[backend.flags]))
