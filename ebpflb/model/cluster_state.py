# SPDX-License-Identifier: Apache-2.0
"""The cluster as last heard: events in, touched services out.

An object that cannot be meant is remarked upon and leaves its last good state in place. Services
are kept as their service ports, so an edit that changes nothing we use touches nothing
(kube-proxy.md 16.3); slices are kept whole, and may come before their Service or outlive it.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from ebpflb.errors import InvalidObject
from ebpflb.model import endpoints, health, nodes, service_cidrs, services
from ebpflb.model.addresses import Address, Family, Network
from ebpflb.model.events import Changed, Event, Key, Kind, ReadObject, Removed, Replaced
from ebpflb.model.objects import EndpointSlice, Node, Service, ServiceCIDR
from ebpflb.model.selection import Place, Selection, select
from ebpflb.model.services import ServicePort

_NEEDED = frozenset({Kind.SERVICE, Kind.ENDPOINT_SLICE, Kind.NODE})


class Remark(NamedTuple):
    """One line for the operator about one object; ``refused``: its last good state stays."""

    kind: Kind
    key: Key
    source: str
    text: str
    refused: bool

    def __str__(self) -> str:
        text = " ".join(self.text.split())  # it quotes the object, which may hold line breaks
        end = " (its last good state stays)" if self.refused else ""
        return f"{self.source}: {self.kind} {self.key}: {text}{end}"


class ClusterState:
    """What the cluster looks like from one node.

    ``serve_external_ips`` is the gate AllowServiceExternalIPs: without it externalIPs lead nowhere,
    and count for the policies as ever (kube-proxy.md 1.4). ``bind_address`` is the node's primary
    address, and its family the primary one, whatever the Node says (kube-proxy.md 17).
    """

    def __init__(
        self,
        node_name: str,
        *,
        bind_address: Address | None = None,
        serve_external_ips: bool = True,
    ) -> None:
        self.node_name = node_name
        self.serve_external_ips = serve_external_ips
        self.zone = ""
        self.node: Node | None = None
        self._said = () if bind_address is None else (bind_address,)
        self.primary: dict[Family, Address] = nodes.primary(self._said)
        self.services: dict[Key, tuple[ServicePort, ...]] = {}
        self.slices: dict[Key, EndpointSlice] = {}
        self.slices_of: dict[Key, set[Key]] = defaultdict(set)
        self.ranges: dict[Key, tuple[Network, ...]] = {}
        self.listed: set[Kind] = set()
        self.touched: set[Key] = set()
        self.refused: dict[tuple[Kind, Key], str] = {}

    @property
    def complete(self) -> bool:
        """Every list that a service depends on has been received; before that program nothing."""
        return self.listed >= _NEEDED

    @property
    def service_cidrs(self) -> frozenset[Network]:
        """Where cluster IPs are from; nothing is known before ServiceCIDR is in ``listed``."""
        return frozenset(network for ranges in self.ranges.values() for network in ranges)

    def hear(self, event: Event) -> list[Remark]:
        """Takes an event in; adds the services that it touches to ``touched``."""
        if isinstance(event, Replaced):
            return self._replace(event)
        if isinstance(event, Changed):
            return self._change(event.kind, event.key, event.found)
        if isinstance(event, Removed):
            self._remove(event.kind, event.key)
        return []

    def take_touched(self) -> set[Key]:
        """The services touched since the last call."""
        touched, self.touched = self.touched, set()
        return touched

    def ports(self, service: Key) -> Iterator[tuple[ServicePort, Selection]]:
        """The service's ports, each with the endpoints that this node uses."""
        place = Place(self.node_name, self.zone)
        slices = self._slices(service)
        for port in self.services.get(service, ()):
            yield port, select(port, endpoints.merge(slices, port.name, self.node_name), place)

    def checked(self, service: Key) -> health.Checked | None:
        """What the service's health-check node port is to say, if it has one."""
        ports = self.services.get(service, ())
        return health.checked(ports, self._slices(service), self.node_name)

    def _slices(self, service: Key) -> list[EndpointSlice]:
        return [self.slices[key] for key in self.slices_of.get(service, ())]

    def _replace(self, event: Replaced) -> list[Remark]:
        known = {
            Kind.SERVICE: self.services.keys(),
            Kind.ENDPOINT_SLICE: self.slices.keys(),
            Kind.SERVICE_CIDR: self.ranges.keys(),
        }
        refused = {key for kind, key in self.refused if kind is event.kind}
        for key in (known.get(event.kind, set()) | refused) - event.objects.keys():
            self._remove(event.kind, key)
        self.listed.add(event.kind)
        return [
            remark
            for key, found in event.objects.items()
            for remark in self._change(event.kind, key, found)
        ]

    def _change(self, kind: Kind, key: Key, found: ReadObject) -> list[Remark]:
        self.refused.pop((kind, key), None)
        try:
            texts = self._take_in(key, found)
        except InvalidObject as invalid:
            self.refused[kind, key] = str(invalid)
            return [Remark(kind, key, found.source, str(invalid), refused=True)]
        return [Remark(kind, key, found.source, text, refused=False) for text in texts]

    def _take_in(self, key: Key, found: ReadObject) -> tuple[str, ...]:
        match found.object:
            case InvalidObject(field=field, reason=reason):
                raise InvalidObject(field, reason)  # anew: it keeps the frames that it passes
            case Service() as service:
                return self._take_service(key, service)
            case EndpointSlice() as slice:
                return self._take_slice(key, slice)
            case Node() as node:
                return self._take_node(node)
            case ServiceCIDR() as cidr:
                self.ranges[key] = service_cidrs.read(cidr)
                return ()

    def _take_service(self, key: Key, service: Service) -> tuple[str, ...]:
        ports, remarks = services.read(service, serve_external_ips=self.serve_external_ips)
        if ports != self.services.get(key):
            self.services[key] = ports
            self.touched.add(key)
        return remarks

    def _take_slice(self, key: Key, slice: EndpointSlice) -> tuple[str, ...]:
        remarks = endpoints.check(slice)
        if slice == self.slices.get(key):
            return ()
        self._forget_slice(key)
        service = endpoints.service_of(slice)
        if service is not None:
            self.slices[key] = slice
            self.slices_of[service].add(key)
            self.touched.add(service)
        return remarks

    def _take_node(self, node: Node) -> tuple[str, ...]:
        self.node = node
        zone = nodes.zone(node)
        if zone != self.zone:
            self.zone = zone
            self.touched |= self.services.keys()
        primary = nodes.primary([*self._said, *nodes.addresses(node)])
        if primary != self.primary:
            self.primary = primary
            self.touched |= {k for k, ports in self.services.items() if _are_restricted(ports)}
        return ()

    def _remove(self, kind: Kind, key: Key) -> None:
        """A Node that is deleted is remembered as it was (kube-proxy.md 13.1)."""
        self.refused.pop((kind, key), None)
        if kind is Kind.SERVICE and self.services.pop(key, None) is not None:
            self.touched.add(key)
        elif kind is Kind.ENDPOINT_SLICE:
            self._forget_slice(key)
        elif kind is Kind.SERVICE_CIDR:
            self.ranges.pop(key, None)

    def _forget_slice(self, key: Key) -> None:
        former = self.slices.pop(key, None)
        service = endpoints.service_of(former) if former is not None else None
        if service is None:
            return
        self.touched.add(service)
        self.slices_of[service].discard(key)
        if not self.slices_of[service]:
            del self.slices_of[service]


def _are_restricted(ports: tuple[ServicePort, ...]) -> bool:
    """Whether it matters for them which address is this node's own (kube-proxy.md 7)."""
    return any(port.source_ranges for port in ports)
