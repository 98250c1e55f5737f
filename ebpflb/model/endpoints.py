# SPDX-License-Identifier: Apache-2.0
"""The EndpointSlices of a Service -> the endpoints of one service port (kube-proxy.md 2).

A Service has any number of slices: some for each family, more for pods that resolve a named target
port to another number, and hand-written ones. Slices are merged by port name and protocol. If two
slices hold the same endpoint, one that is not terminating is used. If several are not terminating,
kube-proxy may use any of them; here slices are read in the order of their names and the last such
endpoint is used, so that the order of events does not matter.

Before: endpoint_slices.py defines the stored form of a slice. Then ``select`` decides which
endpoints a service port uses (kube-proxy.md 3), and ``uses`` says why the others are not used.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import NamedTuple, TypeAlias, TypeVar

from msgspec import Struct, structs

from ebpflb.model import annotations, endpoint_slices
from ebpflb.model.addresses import Address, Family, host_port
from ebpflb.model.endpoint_slices import EndpointName, Hints, StoredEndpoint, StoredSlice
from ebpflb.model.services import PortName, ServicePort

# Work in steps: the agent's loop does other work between two of them.
#
# A Service may have 100,000 endpoints. What takes longer than some milliseconds for them is a
# generator, so that no other Service waits for it.

IN_A_STEP = 1000  # endpoints: some milliseconds
FAST = 20  # times as many take a step where no object is made for each

_Made = TypeVar("_Made")
_Item = TypeVar("_Item")

Steps: TypeAlias = Generator[int, None, _Made]
"""Yields the cost of each step, in units of about 10 µs; returns what is made."""


def finished(steps: Generator[object, None, _Made]) -> _Made:
    """Run all steps and return the result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            made: _Made = end.value
            return made


def in_parts(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """Yield the items in order, IN_A_STEP at a time."""
    return (items[at : at + IN_A_STEP] for at in range(0, len(items), IN_A_STEP))


_by_name = attrgetter("name")


class Endpoint(Struct, frozen=True, gc=False):
    """One address and port of a service port."""

    address: Address
    port: int
    ready: bool
    serving: bool
    terminating: bool
    local: bool
    name: EndpointName
    hints: Hints
    weight: int = annotations.DEFAULT_WEIGHT
    set_aside: "UnusedReason | None" = None


SetAside = Mapping[tuple[Address, int], "UnusedReason"]
"""Endpoints that get no new connections as long as others are ready, whatever the API says."""

NONE_SET_ASIDE: SetAside = {}


SlicesOfPorts = Mapping[tuple[str, str, Family], list[StoredSlice]]
"""Port name, protocol and family -> the slices with this port, sorted by name."""


def slices_of_ports(slices: Iterable[StoredSlice]) -> SlicesOfPorts:
    """Return the slices of a Service by port.

    So a Service with many ports and slices costs no more than the ports in its slices.
    """
    found: defaultdict[tuple[str, str, Family], list[StoredSlice]] = defaultdict(list)
    for slice in sorted(slices, key=_by_name):
        if slice.family is not None:
            for name, protocol in slice.ports:
                found[name, protocol, slice.family].append(slice)
    return found


def of_port(slices: SlicesOfPorts, name: PortName) -> list[StoredSlice]:
    return slices.get((name.port, name.protocol.name, name.family), [])


def count(slices: Iterable[StoredSlice], name: PortName) -> int:
    """Return the number of endpoints that ``slices`` list for a service port."""
    return sum(
        len(slice.endpoints) * len(tuple(endpoint_slices.port_numbers(slice, name)))
        for slice in slices
    )


def merge(
    slices: Iterable[StoredSlice],
    name: PortName,
    node_name: str,
    set_aside: SetAside = NONE_SET_ASIDE,
) -> tuple[Endpoint, ...]:
    """Return the endpoints of one service port, sorted by their "address:port" text.

    ``slices`` are all slices of its Service, in any order.
    """
    return finished(merging(sorted(slices, key=_by_name), name, node_name, set_aside))


def merging(
    slices: Iterable[StoredSlice], name: PortName, node_name: str, set_aside: SetAside
) -> Steps[tuple[Endpoint, ...]]:
    """Like ``merge``, with a step for each slice; ``slices`` are sorted by name."""
    found: dict[str, Endpoint] = {}
    for slice in slices:
        if slice.family == name.family:
            for port in endpoint_slices.port_numbers(slice, name):
                _add(found, slice, port, node_name)
                yield len(slice.endpoints)
    if set_aside:
        found = {
            key: structs.replace(each, set_aside=set_aside.get((each.address, each.port)))
            for key, each in found.items()
        }
    return tuple([found[key] for key in sorted(found)])


def _add(found: dict[str, Endpoint], slice: StoredSlice, port: int, node_name: str) -> None:
    for stored in slice.endpoints:
        address, (ready, serving, terminating) = stored.address, stored.conditions
        if address is None or isinstance(address, str):
            continue
        key = host_port(address, port)
        if terminating and key in found:
            continue
        name = stored.name
        local = name.node == node_name and node_name != ""
        conditions = ready, serving, terminating, local
        found[key] = Endpoint(address, port, *conditions, name, stored.hints, slice.weight)


# Which endpoints a service port uses, seen from one node (kube-proxy.md 3).
#
# Traffic under a Cluster policy goes to the *cluster* list, under a Local policy to the *local*
# list. Each list holds the ready endpoints, or if there are none the terminating ones that still
# serve. Both lists are always selected, so that a policy can change without the endpoints. Topology
# hints apply to the cluster list only. If a list is empty, ``has_any`` says whether there are
# endpoints elsewhere (drop) or none at all (refuse, kube-proxy.md 6.1).

_Endpoints = tuple[Endpoint, ...]
_Hints = Callable[[Endpoint], frozenset[str]]

_node_hints: _Hints = attrgetter("hints.nodes")
_zone_hints: _Hints = attrgetter("hints.zones")


class Topology(Struct, frozen=True):
    """The node's name and zone; ``zone`` is "" if the node has no zone label."""

    node: str
    zone: str


@dataclass(frozen=True, slots=True)
class Selection:
    """The endpoints in use; each list keeps the order of its input.

    ``serving`` holds every serving endpoint, under any policy: existing UDP flows may keep these
    (kube-proxy.md 11.1). ``has_any``: there are usable endpoints, here or elsewhere. ``listed`` are
    all endpoints, used or not.
    """

    cluster: _Endpoints
    local: _Endpoints
    serving: _Endpoints
    has_any: bool
    listed: _Endpoints = ()


def select(endpoints: _Endpoints, topology: Topology) -> Selection:
    """Select endpoints by kube-proxy.md 3; a ready endpoint is used even if it does not serve.

    An endpoint of weight 0, which kube-proxy does not have, gets no new connections. One that is
    set aside gets some only in a list that would have no ready endpoint otherwise.
    """
    weighted = [endpoint for endpoint in endpoints if endpoint.weight]
    ready = tuple([endpoint for endpoint in weighted if endpoint.ready])
    answering = without_set_aside(ready)
    terminating = tuple([each for each in weighted if each.serving and each.terminating])
    return Selection(
        cluster=_nearest(answering, topology) or terminating,
        local=_local(answering) or _local(ready) or _local(terminating),
        serving=tuple([endpoint for endpoint in endpoints if endpoint.serving]),
        has_any=bool(ready or terminating),
        listed=endpoints,
    )


def without_set_aside(ready: _Endpoints) -> _Endpoints:
    """Return the endpoints that are not set aside; all if each of them is."""
    return tuple([endpoint for endpoint in ready if not endpoint.set_aside]) or ready


def uses_cluster(port: ServicePort) -> bool:
    """Whether the cluster list is used.

    Under ETP Local the node and its pods use it too (kube-proxy.md 4.3).
    """
    return port.externally_accessible or not port.internal_local


def uses_local(port: ServicePort) -> bool:
    """Whether the policy Local applies to some of its frontends."""
    return port.internal_local or (port.external_local and port.externally_accessible)


def hinted_by_node(ready: _Endpoints, topology: Topology) -> _Endpoints:
    """Return the ready endpoints whose hints name this node; empty if that mode is off."""
    return _hinted(ready, _node_hints, topology.node)


def _nearest(ready: _Endpoints, topology: Topology) -> _Endpoints:
    """Apply the topology modes of kube-proxy.md 3.1, narrowest first.

    The result is empty only if ``ready`` is.
    """
    by_node = hinted_by_node(ready, topology)
    return by_node or _hinted(ready, _zone_hints, topology.zone) or ready


def _hinted(ready: _Endpoints, hints: _Hints, here: str) -> _Endpoints:
    """Return the endpoints hinted for ``here``; empty if the mode is off.

    The mode is off if the node has no name or zone, or if some endpoint has no hint.
    """
    if not here or not all(map(hints, ready)):
        return ()
    return tuple([endpoint for endpoint in ready if here in hints(endpoint)])


def _local(endpoints: _Endpoints) -> _Endpoints:
    return tuple([endpoint for endpoint in endpoints if endpoint.local])


# Why an endpoint is not used.
#
# ``merge`` and ``select`` alone decide which endpoints are used. The code here only derives from
# their results which condition an endpoint did not meet.


class UnusedReason(StrEnum):
    """The reasons in the operator's words."""

    # Not selected.
    NOT_READY = "not ready"
    NOT_SERVING = "terminating, and no longer serving"
    OTHERS_READY = "terminating, while others are ready"
    LISTENER_SILENT = "does not answer on this node, so sockets get endpoints"
    SET_ASIDE = "set aside: connections from this node fail to open (--endpoint-health)"
    OTHER_NODES = "for other nodes, by its hints"
    OTHER_ZONES = "for other zones, by its hints"
    NOT_LOCAL = "on another node, under policy Local"
    # No endpoint of a service port.
    ADDRESS_TYPE = "its slice has neither IPv4 nor IPv6 addresses"
    OTHER_FAMILY = "the service has no cluster IP of its family"
    NO_ADDRESS = "its first address is missing or invalid"
    NO_SUCH_PORT = "its slice has no such port"
    NO_WEIGHT = "its slice has the weight 0"
    # Selected, but not in the maps.
    CLAIMED = "other Services have every address"
    NO_SPACE = "no space"
    NOT_WRITTEN = "not written yet"
    GONE = "no longer in a slice, removal not written yet"


class Use(NamedTuple):
    """Why an endpoint is not in a list; None if it is, or if no policy uses that list."""

    endpoint: Endpoint
    not_in_cluster: UnusedReason | None
    not_in_local: UnusedReason | None


class LeftOut(NamedTuple):
    """An entry of a slice that is no endpoint of ``port``; None: of any service port."""

    port: PortName | None
    slice: str
    endpoint: StoredEndpoint
    reason: UnusedReason


def uses(
    port: ServicePort, found: tuple[Endpoint, ...], selected: Selection, topology: Topology
) -> list[Use]:
    """Return a Use for each endpoint of a service port, in order.

    ``selected`` is the selection of them.
    """
    cluster, local = set(map(id, selected.cluster)), set(map(id, selected.local))
    in_cluster, in_local = uses_cluster(port), uses_local(port)
    ready = without_set_aside(tuple([each for each in found if each.ready and each.weight]))
    hints = UnusedReason.OTHER_ZONES
    if hinted_by_node(ready, topology):
        hints = UnusedReason.OTHER_NODES
    return [
        Use(
            each,
            _not_in_cluster(each, hints) if in_cluster and id(each) not in cluster else None,
            _not_in_local(each) if in_local and id(each) not in local else None,
        )
        for each in found
    ]


def usable(port: ServicePort, selected: Selection) -> set[int]:
    """Return the object ids of the endpoints that some policy of the service port may use."""
    lists = (
        selected.cluster if uses_cluster(port) else (),
        selected.local if uses_local(port) else (),
    )
    return {id(each) for found in lists for each in found}


def places(found: Iterable[Endpoint]) -> frozenset[tuple[Address, int]]:
    """Return the endpoints' addresses and ports."""
    return frozenset((each.address, each.port) for each in found)


def left_out(slices: Iterable[StoredSlice], ports: Iterable[ServicePort]) -> Iterator[LeftOut]:
    """Yield the entries of a Service's slices that are no endpoints of some service ports."""
    ports = tuple(ports)
    for slice in slices:
        for endpoint in slice.endpoints:
            for port, reason in _reasons(slice, endpoint, ports):
                yield LeftOut(port, slice.name, endpoint, reason)


def _reasons(
    slice: StoredSlice, endpoint: StoredEndpoint, ports: tuple[ServicePort, ...]
) -> Iterator[tuple[PortName | None, UnusedReason]]:
    of_family = [port.name for port in ports if port.name.family == slice.family]
    if slice.family is None:
        yield None, UnusedReason.ADDRESS_TYPE
    elif not of_family:
        yield None, UnusedReason.OTHER_FAMILY
    elif endpoint.address is None or isinstance(endpoint.address, str):
        yield None, UnusedReason.NO_ADDRESS
    else:
        for name in of_family:
            if not any(endpoint_slices.port_numbers(slice, name)):
                yield name, UnusedReason.NO_SUCH_PORT


def _not_in_cluster(endpoint: Endpoint, hints: UnusedReason) -> UnusedReason:
    if not endpoint.weight:
        return UnusedReason.NO_WEIGHT
    return endpoint.set_aside or hints if endpoint.ready else _not_ready(endpoint)


def _not_in_local(endpoint: Endpoint) -> UnusedReason:
    if not endpoint.weight:
        return UnusedReason.NO_WEIGHT
    usable = endpoint.ready or (endpoint.serving and endpoint.terminating)
    if usable and not endpoint.local:
        return UnusedReason.NOT_LOCAL
    return endpoint.set_aside or _not_ready(endpoint)


def _not_ready(endpoint: Endpoint) -> UnusedReason:
    if not endpoint.terminating:
        return UnusedReason.NOT_READY
    return UnusedReason.OTHERS_READY if endpoint.serving else UnusedReason.NOT_SERVING


# One Service -> the answer of its health-check node port (kube-proxy.md 10).
#
# A load balancer that sends traffic only to nodes with endpoints (externalTrafficPolicy Local) asks
# each node on this port whether it has any. Only ready endpoints count: terminating ones may still
# serve, but should get no new connections.


class HealthCheck(Struct, frozen=True):
    """``local_endpoints``: the number of endpoints by family, for the families of the Service."""

    port: int
    local_endpoints: Mapping[Family, int]


class LocalEndpoints:
    """Collects the ready endpoints on this node of a Service's ports."""

    def __init__(self) -> None:
        self._port = 0
        self._found: dict[Family, set[Address]] = {}

    def add(self, port: ServicePort, selection: Selection) -> None:
        """Add a port; endpoints of weight 0 do not count, because they get no new connections."""
        if port.health_check_node_port:
            self._port = port.health_check_node_port
            counted = (it for it in selection.listed if it.ready and it.local and it.weight)
            addresses = self._found.setdefault(port.name.family, set())
            addresses.update(each.address for each in counted)

    @property
    def health_check(self) -> HealthCheck | None:
        """The answer; None for a Service without such a port."""
        counts = {family: len(self._found[family]) for family in sorted(self._found)}
        return HealthCheck(self._port, counts) if self._port else None


# Count service ports that the policy Local leaves without an endpoint on this node.
#
# See kube-proxy.md 14: the policy is Local and there are endpoints on other nodes only.


class TrafficPolicy(StrEnum):
    """The policy for traffic to the cluster IP, or to all other frontends."""

    INTERNAL = "internal"
    EXTERNAL = "external"


def policies_without_endpoints(port: ServicePort, selection: Selection) -> frozenset[TrafficPolicy]:
    """Return the Local policies that have endpoints, but none on this node."""
    if selection.local or not selection.has_any:
        return frozenset()
    external = port.external_local and port.externally_accessible
    local = {TrafficPolicy.INTERNAL: port.internal_local, TrafficPolicy.EXTERNAL: external}
    return frozenset(policy for policy, is_local in local.items() if is_local)


class NoLocalEndpoints:
    """The number of such service ports by policy and family; an update takes constant time.

    ``changed``: since the receiver of ``counts`` has cleared it.
    """

    def __init__(self) -> None:
        self.changed = True
        self._policies: dict[PortName, frozenset[TrafficPolicy]] = {}
        self._counts: Counter[tuple[TrafficPolicy, Family]] = Counter()

    def update(self, name: PortName, policies: frozenset[TrafficPolicy]) -> None:
        """Set the policies of a service port without an endpoint; () if it is deleted."""
        former = self._policies.pop(name, None)
        if not former and not policies:  # true for nearly all service ports
            return
        self.changed = True
        self._counts.subtract((policy, name.family) for policy in former or ())
        self._counts.update((policy, name.family) for policy in policies)
        if policies:
            self._policies[name] = policies

    @property
    def counts(self) -> dict[TrafficPolicy, dict[Family, int]]:
        """The counts for every policy and family, zeros included."""
        return {p: {family: self._counts[p, family] for family in Family} for p in TrafficPolicy}
