# SPDX-License-Identifier: Apache-2.0
"""An independent oracle: what an agent must serve after receiving some of a cluster's objects.
Nothing of ``ebpflb.model`` or ``ebpflb.plan`` decides here, but slices are read by the model.
"""

from collections.abc import Iterator
from ipaddress import ip_address, ip_network
from typing import Any, NamedTuple

from ebpflb.model.annotations import NODEPORT_RANGES_ANNOTATION, ON_REMOVAL_ANNOTATION
from ebpflb.model.endpoint_slices import ReadSlice
from ebpflb.model.events import Changed, Key, Kind, Removed, Replaced
from ebpflb.model.objects import Service, ServicePortSpec
from tests.simulation.cluster import GRACES
from tests.simulation.places import (
    AT_LOOPBACK,
    CLUSTER_IPS,
    FRONTENDS,
    NODE,
    NODE_ADDRESS,
    SENDERS,
    Asking,
    Place,
    Where,
    of_family,
    version_of,
)

Sid = tuple[Key, str, int]
"""A service port in one family: affinity is to it, whatever the frontend."""
NOBODY = frozenset[Place]()
_NAMED = {"node": NODE_ADDRESS} | {each.name: each.address for each in SENDERS}


class Served(NamedTuple):
    """The result of a frontend.

    ``inside``: the backends of local clients, ``outside``: those of all other clients
    (kube-proxy.md 4). ``cluster``, ``local``: those of either policy, in force or not. ``serving``
    keep their datagrams; ``used``: all that get new connections by any frontend of the service.
    ``has_any``: some node has an endpoint. ``admits``: the clients by name; None: all. ``external``
    and ``local_only`` decide who is masqueraded (kube-proxy.md 5.1). ``grace``: when connections to
    removed endpoints are reset, in seconds; None: never. ``is_there``: false for a port that the
    service with this cluster IP does not have.
    """

    service: Sid
    inside: frozenset[Place] = NOBODY
    outside: frozenset[Place] = NOBODY
    cluster: frozenset[Place] = NOBODY
    local: frozenset[Place] = NOBODY
    serving: frozenset[Place] = NOBODY
    used: frozenset[Place] = NOBODY
    has_any: bool = False
    affinity: bool = False
    admits: frozenset[str] | None = None
    external: bool = False
    local_only: bool = False
    grace: float | None = None
    is_there: bool = True

    def backends(self, client: Asking) -> frozenset[Place]:
        return self.inside if client.local else self.outside

    def uses_local(self, client: Asking) -> bool:
        """Whether the client gets only backends of this node (kube-proxy.md 4.3)."""
        return self.local_only and not (self.external and client.local)

    def by_policy_of(self, former: "Served", client: Asking) -> frozenset[Place]:
        """Return the backends if this Service's endpoints are known, but its policy is not yet."""
        return self.local if former.uses_local(client) else self.cluster


UNUSED = Served((Key("", ""), "", 0), is_there=False)
View = dict[Where, Served]


class Endpoints(NamedTuple):
    """The endpoints of one service port in one family; each says whether it is on this node."""

    ready: frozenset[tuple[Place, bool]]
    leaving: frozenset[tuple[Place, bool]]
    serving: frozenset[Place]

    @property
    def cluster(self) -> frozenset[Place]:
        """Return the ready endpoints; if there are none, those that still serve
        (kube-proxy.md 3).
        """
        return frozenset(place for place, _ in self.ready or self.leaving)

    @property
    def local(self) -> frozenset[Place]:
        """Return this node's ready endpoints; if there are none, those that still serve."""
        return _here(self.ready) or _here(self.leaving)


def _here(found: frozenset[tuple[Place, bool]]) -> frozenset[Place]:
    return frozenset(place for place, here in found if here)


class Known:
    """The objects that an agent has received, and what it must serve then."""

    def __init__(self, before: "Known | None") -> None:
        """``before`` is what the former agent knew. Its ranges stay until new ones are received."""
        self._view: View | None = None
        ranges = before.objects.get(Kind.SERVICE_CIDR) if before else None
        self.objects: dict[Kind, dict[Key, Any]] = {}
        if ranges is not None:
            self.objects[Kind.SERVICE_CIDR] = ranges

    @property
    def complete(self) -> bool:
        return self.objects.keys() >= {Kind.SERVICE, Kind.ENDPOINT_SLICE, Kind.NODE}

    def take(self, event: object) -> None:
        self._view = None
        match event:
            case Replaced(kind, objects):
                self.objects[kind] = {key: found.object for key, found in objects.items()}
            case Changed(kind, key, found):
                self.objects.setdefault(kind, {})[key] = found.object
            case Removed(kind, key):
                self.objects.setdefault(kind, {}).pop(key, None)

    def view(self) -> View:
        """Return the view. It leaves out addresses that no Service has, except a cluster IP that
        lacks the port, a frontend without backends, and UNUSED for an unused address of the range.
        """
        if self._view is not None:
            return self._view
        view = dict(self._entries())
        addresses = {ip: served for (ip, _, _), served in view.items()}
        for where in FRONTENDS:
            if where[0] not in CLUSTER_IPS:
                continue
            if served := addresses.get(where[0]):
                view.setdefault(where, Served(served.service, is_there=False))
            elif Kind.SERVICE_CIDR in self.objects:
                view[where] = UNUSED
        view |= {at: view[node] for at in AT_LOOPBACK if (node := (NODE_ADDRESS, *at[1:])) in view}
        self._view = view
        return view

    def _entries(self) -> Iterator[tuple[Where, Served]]:
        slices: dict[str, list[ReadSlice]] = {}
        for each in self.objects.get(Kind.ENDPOINT_SLICE, {}).values():
            assert each.stored
            slices.setdefault(each.stored.service.name, []).append(each)
        for key, service in self.objects.get(Kind.SERVICE, {}).items():
            assert isinstance(service, Service)
            for port in service.spec.ports or ():
                for ip in service.spec.cluster_ips or ():
                    found = _endpoints(slices.get(key.name, []), port.name or "", version_of(ip))
                    yield from _frontends(key, service, port, ip, found)


def _frontends(
    key: Key, service: Service, port: ServicePortSpec, ip: str, found: Endpoints
) -> Iterator[tuple[Where, Served]]:
    spec, version = service.spec, version_of(ip)
    internal_local = spec.internal_traffic_policy == "Local"
    local_only = spec.external_traffic_policy == "Local"
    internal = found.local if internal_local else found.cluster
    outside = found.local if local_only else found.cluster
    balanced = _balanced(service, version)
    used = internal | (
        outside | found.cluster if port.node_port or balanced or spec.external_ips else NOBODY
    )
    usual = Served(
        (key, port.name or "", version),
        cluster=found.cluster,
        local=found.local,
        serving=found.serving,
        used=used,
        has_any=bool(found.ready or found.leaving),
        affinity=spec.session_affinity == "ClientIP",
        grace=GRACES.get(service.metadata.annotation(ON_REMOVAL_ANNOTATION) or ""),
    )
    external = usual._replace(
        inside=found.cluster, outside=outside, external=True, local_only=local_only
    )
    at_cluster_ip = usual._replace(inside=internal, outside=internal, local_only=internal_local)
    yield (ip, port.port, port.protocol), at_cluster_ip
    if port.node_port:
        admits = _admitted(_nodeport_ranges(service), version)
        at = of_family(NODE_ADDRESS, version), port.node_port, port.protocol
        yield at, external._replace(admits=admits)
    for address in spec.external_ips or ():
        if version_of(address) == version:
            yield (address, port.port, port.protocol), external
    for address in balanced:
        admits = _admitted(spec.load_balancer_source_ranges or (), version)
        yield (address, port.port, port.protocol), external._replace(admits=admits)


def _balanced(service: Service, version: int) -> list[str]:
    balancer = service.status and service.status.load_balancer
    found = [each.ip for each in (balancer and balancer.ingress) or () if each.ip]
    return [each for each in found if version_of(each) == version]


def _nodeport_ranges(service: Service) -> list[str]:
    text = service.metadata.annotation(NODEPORT_RANGES_ANNOTATION)
    return text.split(",") if text else []


def _admitted(ranges: object, version: int) -> frozenset[str] | None:
    """Return the admitted clients of the simulation; a list without any range of the family admits
    all.
    """
    assert isinstance(ranges, list | tuple)
    networks = [ip_network(each) for each in ranges]
    networks = [each for each in networks if each.version == version]
    if not networks:
        return None
    return frozenset(
        name
        for name, address in _NAMED.items()
        if any(ip_address(of_family(address, version)) in each for each in networks)
    )


def _endpoints(slices: list[ReadSlice], port: str, version: int) -> Endpoints:
    """Return the endpoints with a weight; an endpoint that only serves may have none."""
    ready, leaving = set[tuple[Place, bool]](), set[tuple[Place, bool]]()
    serving = set[Place]()
    for each in slices:
        stored = each.stored
        assert stored
        if stored.family != version:
            continue
        numbers = [at for (name, _), found in stored.ports.items() if name == port for at in found]
        for endpoint in stored.endpoints:
            here = endpoint.name.node == NODE
            places = {((str(endpoint.address), number), here) for number in numbers}
            serving |= {place for place, _ in places}
            if stored.weight:
                (ready if endpoint.conditions.ready else leaving).update(places)
    return Endpoints(frozenset(ready), frozenset(leaving), frozenset(serving))
