# SPDX-License-Identifier: Apache-2.0
"""The desired content of the maps for a service port, before ids are allocated.

The backends are in the order of their slots: first those in the cluster list only, then those in
both lists, then those in the local list only, then those that serve only their existing flows, and
last the node-local listener, if one answers. So each list is one range of slots, and a backend in
both lists has one slot. The order does not depend on whether an endpoint is on this node.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from ipaddress import IPv4Address, IPv6Address, ip_network
from itertools import product
from typing import NamedTuple

from msgspec import Struct

from ebpflb.entries.services import (
    NO_FLAGS,
    NO_PREFIX,
    NO_V4,
    NO_V6,
    WHOLE,
    BackendName,
    DeviceEntry,
    Flags,
    Frontend,
    Prefix,
    Settings,
    prefix_of,
    stored_name,
)
from ebpflb.model import devices
from ebpflb.model.addresses import Address, Family, Network, family
from ebpflb.model.annotations import DEFAULT_WEIGHT
from ebpflb.model.api_servers import ApiPlaces
from ebpflb.model.devices import AddressByFamily, Device, Devices, LocalDetector
from ebpflb.model.endpoints import FAST, Selection, Steps, in_parts
from ebpflb.model.hand_over import Weights
from ebpflb.model.nodes import Rules
from ebpflb.model.services import PortName, Protocol, ServicePort
from ebpflb.plan import tables

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
NODE_LOCAL = "node-local"  # the name of a listener, in the place of a pod's
_LISTENER = BackendName("", NODE_LOCAL, "")


class DesiredBackend(Struct, frozen=True, gc=False):
    """An endpoint as its slot will hold it; ``is_set_aside`` is not in the slot."""

    address: Address
    port: int
    flags: Flags
    name: BackendName
    weight: int = DEFAULT_WEIGHT
    is_set_aside: bool = False

    @property
    def endpoint(self) -> tuple[Address, int]:
        """The backend's identity: it keeps its id as long as the service has this endpoint."""
        return self.address, self.port


LIMIT = "limit"  # instead of a map: what is lacking is beyond a limit of one Service


class Lack(NamedTuple):
    """Additional entries of map ``part`` that are needed.

    ``namespace``, or anyone if it is EVERYONE, can free them.
    """

    namespace: str
    part: str
    more: int
    reason: str  # for the operator


class Size(NamedTuple):
    """The entries that a service port is to have in these two maps."""

    services: int
    backend_slots: int


NOTHING = Size(0, 0)


@dataclass(frozen=True, slots=True)
class DesiredService:
    """The desired map content for one service port.

    ``created`` decides which service port gets a frontend that several claim (see ``Claims``).
    ``source_ranges`` and ``nodeport_source_ranges`` are the clients that "restricted" VIPs and a
    "restricted" NodePort admit. ``lack``: why it is not whole. ``withheld`` are frontends that the
    Service asks for and does not get, because this agent reaches an API server there.
    ``handed_to``: the nodes to which requests at external addresses are handed (hand_over.py).
    """

    name: PortName
    created: str
    frontends: dict[Frontend, Flags]
    affinity_seconds: int
    backends: tuple[DesiredBackend, ...]
    source_ranges: tuple[Network, ...] = ()
    nodeport_source_ranges: tuple[Network, ...] = ()
    lack: Lack | None = None
    withheld: Mapping[Frontend, Flags] = field(default_factory=dict)
    handed_to: Weights | None = None

    @property
    def size(self) -> Size:
        return Size(len(self.frontends), len(self.backends))

    def serves(self, frontend: Frontend) -> bool:
        """Whether there is a backend at the frontend for clients outside."""
        wanted = "local" if "local" in self.frontends[frontend] else "cluster"
        return any(wanted in backend.flags for backend in self.backends)


def desiring(
    port: ServicePort,
    selection: Selection,
    primary: Mapping[Family, Address],
    node_local: Address | None,
    untracked: Rules,
    api: ApiPlaces,
    handed_to: Weights | None = None,
    *,
    keeps_here: bool = False,
) -> Steps[DesiredService]:
    """Return the desired map content for ``port``, in steps.

    ``primary`` are this node's own addresses, ``node_local`` is the address of a listener that
    serves sockets, ``untracked`` what rules in raw exempt, ``api`` the places of the API servers.
    ``keeps_here``: requests at its addresses stay here, whatever the policy (hand_over.py).
    """
    backends = yield from _backends(selection)
    listener = _listener(node_local, port.port, backends)
    usual = selection.has_any, keeps_here
    frontends = _frontends(port, *usual, has_listener=bool(listener))
    withheld = _withheld(port.name, frontends, backends, api)
    for each in withheld:
        del frontends[each]
    return DesiredService(
        name=port.name,
        created=port.created,
        frontends=_untracked(frontends, untracked),
        affinity_seconds=port.affinity_seconds,
        backends=backends + listener,
        source_ranges=_source_ranges(port, primary.get(port.name.family)),
        nodeport_source_ranges=port.nodeport_source_ranges if port.node_port else (),
        lack=Lack(port.name.namespace, LIMIT, 1, port.limit) if port.limit else None,
        withheld=withheld,
        handed_to=handed_to,
    )


def not_made(port: ServicePort, lack: Lack) -> DesiredService:
    """Return a service port of which nothing is made, because it does not fit."""
    return DesiredService(port.name, port.created, {}, 0, (), lack=lack)


WITHHELD = "not served, because this agent reaches an API server there"


def _withheld(
    name: PortName,
    frontends: Mapping[Frontend, Flags],
    backends: tuple[DesiredBackend, ...],
    api: ApiPlaces,
) -> Mapping[Frontend, Flags]:
    """Return the external addresses and NodePorts that the API servers have."""
    if name.protocol != Protocol.TCP or not api.taken:
        return {}
    wanted = (Frontend(*place, Protocol.TCP) for place in api.taken)
    found = {f: flags for f in wanted if "external" in (flags := frontends.get(f, NO_FLAGS))}
    if found and api.are_free_for(name.owner, [each.endpoint for each in backends]):
        return {}
    return found


def _listener(
    address: Address | None, port: int, backends: tuple[DesiredBackend, ...]
) -> tuple[DesiredBackend, ...]:
    """Return the backend of a listener; none if an endpoint has its address and port."""
    if address is None or (address, port) in [each.endpoint for each in backends]:
        return ()
    return (DesiredBackend(address, port, _NODE_LOCAL, _LISTENER),)


def _untracked(frontends: dict[Frontend, Flags], untracked: Rules) -> dict[Frontend, Flags]:
    """Mark the frontends whose packets rules in raw exempt."""
    if not untracked:
        return frontends
    return {
        frontend: flags | {"untracked"} if untracked.find(*frontend) else flags
        for frontend, flags in frontends.items()
    }


def _frontends(
    port: ServicePort, has_any: bool, keeps_here: bool, *, has_listener: bool
) -> dict[Frontend, Flags]:
    """Return the frontends.

    The cluster IP comes last, and so replaces an equal external address.
    """
    protocol, usual = int(port.name.protocol), (port.scheduler, has_any, has_listener)
    external = _flags(*usual, external=True, local=port.external_local)
    routed = external | _flags(*usual, passthrough=port.passthrough, local=keeps_here)
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


def _backends(selection: Selection) -> Steps[tuple[DesiredBackend, ...]]:
    cluster, local = set(map(id, selection.cluster)), set(map(id, selection.local))
    yield len(cluster) // FAST
    found = {id(e): e for e in (*selection.serving, *selection.cluster, *selection.local)}
    backends = list[DesiredBackend]()
    for part in in_parts(list(found.items())):
        backends += [
            DesiredBackend(
                e.address,
                e.port,
                _FLAGS[i in cluster, i in local, e.local],
                stored_name(e.name),
                e.weight,
                is_set_aside=e.set_aside is not None,
            )
            for i, e in part
        ]
        yield len(part)
    yield len(backends) // FAST
    return tuple(sorted(backends, key=lambda backend: _ORDER[backend.flags]))


# The desired content of the maps for this node: its devices and settings.

_DETECT = frozenset({"detect_local"})


class DesiredNode(Struct, frozen=True, dict=True):
    """The desired content of the maps for this node.

    ``known`` are all devices, ``served`` those with programs; ``primary`` are the Node's addresses.
    ``detector`` and ``pod_cidrs`` decide which traffic comes from this node's pods.
    """

    known: Devices
    served: Devices
    primary: AddressByFamily
    detector: LocalDetector
    pod_cidrs: tuple[Network, ...]

    @cached_property
    def _by_index(self) -> dict[int, Device]:
        return devices.by_index(self.known)

    @cached_property
    def _masters(self) -> frozenset[int]:
        """Return the masters of served devices; their packets pass the port's program first."""
        return frozenset(device.master for device in self.served)

    @cached_property
    def _partly_served(self) -> frozenset[int]:
        """Return the masters of devices that are not served."""
        served = {device.index for device in self.served}
        return frozenset(device.master for device in self.known if device.index not in served)

    def devices(self) -> dict[int, DeviceEntry]:
        """The entries of map devices, by ifindex."""
        sources = devices.masquerade_addresses(self.known, self.primary)
        return {
            device.index: DeviceEntry(
                *_both(sources[device.index]), frozenset(self._device_flags(device))
            )
            for device in self.served
        }

    def link_addresses(self) -> dict[str, int]:
        """The entries of map link_addresses."""
        return {device.mac: 1 for device in self.known if device.mac and not device.loopback}

    def settings(self, options: Settings, covering: Mapping[Family, Prefix]) -> Settings:
        """Return the map settings; ``options`` has the fields that the operator sets.

        ``covering`` holds the prefixes that cover all cluster IPs (see ``ClusterIps.cover``).
        """
        pods = {family(n): prefix_of(n) for n in self.detector.networks(self.pod_cidrs)}
        active = self.detector.by_device or bool(pods)
        node_v4, node_v6 = _both(devices.node_addresses(self.known, self.primary))
        return options._replace(
            node_v4=node_v4,
            node_v6=node_v6,
            pods_v4=pods.get(Family.IPV4, NO_PREFIX),
            pods_v6=pods.get(Family.IPV6, NO_PREFIX),
            span_v4=covering.get(Family.IPV4, NO_PREFIX),
            span_v6=covering.get(Family.IPV6, NO_PREFIX),
            flags=options.flags | (_DETECT if active else NO_FLAGS),
        )

    def _device_flags(self, device: Device) -> Iterator[str]:
        known = self._by_index
        if self.detector.is_pod_device(device, known):
            yield "pods"
        if devices.is_host_only(device, known):
            yield "host_only"
        if devices.is_bridged(device, known):
            yield "bridged"
        if device.index in self._masters:
            yield "master"
            if device.index not in self._partly_served:
                yield "all_ports"


def _both(addresses: AddressByFamily) -> tuple[Address, Address]:
    return addresses.get(Family.IPV4, NO_V4), addresses.get(Family.IPV6, NO_V6)
