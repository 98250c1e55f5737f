# SPDX-License-Identifier: Apache-2.0
"""The state of the cluster as one node needs it: ``apply`` an event, and read what changed.

An invalid object is reported, and its last valid version stays in use. Services are stored as their
service ports, so a change of an unused field changes nothing (kube-proxy.md 16.3). EndpointSlices
may arrive before their Service and may outlive it.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from datetime import datetime
from typing import NamedTuple, Protocol, TypeVar

from ebpflb.errors import InvalidObject, one_line, unexpected
from ebpflb.model import api_servers, endpoint_slices, endpoints, nodes, services
from ebpflb.model.addresses import Address, Family, Network
from ebpflb.model.annotations import HEALTH_OFF
from ebpflb.model.api_servers import NO_API_PLACES, KeptApiServers, api_places
from ebpflb.model.claims import Claims
from ebpflb.model.endpoint_slices import ReadSlice, StoredSlice
from ebpflb.model.events import Changed, Key, Kind, ObjectEvent, ReadObject, Removed, Replaced
from ebpflb.model.facts import FACTS, Fact, Values
from ebpflb.model.nodes import NodeLocalPorts, Rules
from ebpflb.model.objects import EndpointSlice, Node, Service, ServiceCIDR
from ebpflb.model.pools import given_back
from ebpflb.model.services import (
    KUBERNETES,
    OF_KUBE_PROXY,
    Admission,
    PortName,
    ServicePort,
    WholeAddresses,
    show_labels,
)

# When endpoints changed whose changes wait for a sync (kube-proxy.md 16.4).
#
# The EndpointSlice controller writes an annotation: the time of the pod's or Service's change that
# made it write the slice. These times are stored until a sync succeeds. Changes from before the
# start of this process do not count as its delay.

_RFC3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII)


def trigger_time(text: str | None) -> float | None:
    """Return seconds since the epoch; None if the text is missing or no time in RFC 3339."""
    if text is None or not _RFC3339.fullmatch(text):
        return None
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


MOST_TIMES = 100  # of a Service: one that changes without end may wait for long


class TriggerTimes:
    """The trigger times of changes that no sync has covered yet, up to MOST_TIMES of each Service.

    ``since`` is when this process started, in seconds since the epoch.
    """

    def __init__(self, since: float) -> None:
        self.since = since
        # namespace -> the times by Service and family
        self._times: defaultdict[str, dict[tuple[Key, Family], list[float]]] = defaultdict(dict)

    def changed(self, service: Key, family: Family, annotation: str | None) -> None:
        """Note that a slice of the service was added or modified."""
        time = trigger_time(annotation)
        if time is not None and time > self.since:
            times = self._times[service.namespace].setdefault((service, family), [])
            times += [time] * (len(times) < MOST_TIMES)

    def removed(self, service: Key, family: Family) -> None:
        """Note that a slice of the service was deleted.

        The annotation of a deleted slice belongs to an earlier change.
        """
        self._times[service.namespace].pop((service, family), None)

    def take(self, waiting: Container[str] = ()) -> dict[Family, list[float]]:
        """Return and delete the stored times; call this when a sync has succeeded.

        Those of the namespaces in ``waiting`` stay: changes of theirs are not written yet.
        """
        found: dict[Family, list[float]] = defaultdict(list)
        for namespace in [each for each in self._times if each not in waiting]:
            for (_, family), times in self._times.pop(namespace).items():
                found[family] += times
        return dict(found)


# What an event changed in the state of the cluster, for counters and reports.

STAYS, IGNORED = "its last good state stays in use", "ignored: it has never been valid here"


class ObjectWarning(NamedTuple):
    """One line for the operator about one object; ``effect`` is the consequence for the object."""

    kind: Kind
    key: Key
    source: str
    text: str
    effect: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {self.kind} {self.key}: {self.reason}"

    @property
    def reason(self) -> str:
        """The warning without the object's name."""
        text = one_line(self.text)  # the text quotes the object
        return f"{text} ({self.effect})" if self.effect else text


class SliceChange(NamedTuple):
    """An EndpointSlice before and after an event; None if it did not or does not exist."""

    before: StoredSlice | None
    after: StoredSlice | None


class Applied(NamedTuple):
    """The changes by one event; kube-proxy.md 14 and 16.4 say which are counted."""

    service_events: int  # how many Services the event concerned, changed or not
    services: frozenset[Key]  # those whose service ports changed
    slices: Mapping[Key, SliceChange]  # the EndpointSlices that changed
    warnings: tuple[ObjectWarning, ...]


_NEEDED = frozenset({Kind.SERVICE, Kind.ENDPOINT_SLICE, Kind.NODE})

_Stored = TypeVar("_Stored")
Claimed = Callable[[], Iterable[tuple[tuple[Address, int, int], Iterable[PortName]]]]


class Watch(Protocol):
    """A thread that sleeps while no Service wants it."""

    def want(self, wanted: object) -> None: ...


class ClusterState:
    """The state of the cluster as seen from one node.

    ``bind_address`` is the primary address, and its family the primary one, whatever the Node says
    (kube-proxy.md 17).
    """

    def __init__(
        self,
        node_name: str,
        *,
        bind_address: Address | None = None,
        admission: Admission = OF_KUBE_PROXY,
    ) -> None:
        self.node_name = node_name
        self.admission = admission
        self.zone = ""
        self.node: Node | None = None
        self._bind_addresses = () if bind_address is None else (bind_address,)
        self.primary: dict[Family, Address] = nodes.primary_addresses(self._bind_addresses)
        self.services: dict[Key, tuple[ServicePort, ...]] = {}
        self.labels: dict[Key, str] = {}  # of Services that have any: NAME=VALUE,...
        # Of the last version of an object: a problem is logged once, and not with each change.
        self._warnings: dict[tuple[Kind, Key], tuple[str, ...]] = {}
        self.slices: dict[Key, StoredSlice] = {}
        self.slices_of: dict[Key, dict[Key, None]] = {}  # Service -> its slices
        self.ranges: dict[Key, tuple[Network, ...]] = {}  # ServiceCIDR -> its networks
        # The ranges of cluster IPs; unknown before Kind.SERVICE_CIDR is in ``listed``.
        self.service_cidrs: frozenset[Network] = frozenset()
        self._of_servers: tuple[StoredSlice, ...] = ()  # the slices of KUBERNETES that count
        self.watches: tuple[Watch, ...] = ()  # of what Services want observed on this node
        wanting = set[Key](), set[Key](), set[Key]()  # Services
        self.with_passive_health, self.with_rebalance, self.with_keep_client = wanting
        self._wanting = tuple(zip(wanting, _WANTS, strict=True))
        self.node_local = NodeLocalPorts()
        self.claims = Claims(admission.pools, keeps_nodes=admission.hands_over)
        self.address_owners: Mapping[str, str] = {}  # address -> the node that answers for it
        self.address_nodes: Collection[str] = ()  # those among which it is chosen, and that live
        self.observed: dict[Fact, Values] = dict.fromkeys(Fact, frozenset())
        self.untracked, self.drop_rules = Rules(), Rules()  # of this node: in raw; that drop
        self.claimed: Claimed = tuple  # who claims each frontend: a Service may ask for more
        self.api_places = NO_API_PLACES
        self._servers: frozenset[tuple[Address, int]] = frozenset()  # the last known API servers
        self.aside: dict[PortName, dict[tuple[Address, int], endpoints.UnusedReason]] = {}
        self.listed: set[Kind] = set()
        self.changed_services: set[Key] = set()  # to be planned again; the reader empties it
        self.invalid: dict[tuple[Kind, Key], str] = {}  # invalid object -> what is wrong with it

    @property
    def complete(self) -> bool:
        """Whether every list that a service depends on was received.

        Until then nothing is written.
        """
        return self.listed >= _NEEDED

    def api_servers(self) -> KeptApiServers | None:
        """Return the API servers; None if they are not known, or not to be kept."""
        if not self.admission.keeps_api_servers:
            return None
        return api_servers.keep(self.slices_for(KUBERNETES))

    def observe(self, fact: Fact, values: Values) -> bool:
        """Take all values of a fact; return whether they differ from the last ones."""
        changed, rule = self.observed[fact] ^ values, FACTS[fact]
        if not changed:
            return False
        self.observed[fact] = values
        if fact is Fact.UNTRACKED_DESTINATIONS:
            self.untracked = Rules(values)
        if fact is Fact.DROPPED_DESTINATIONS:
            self.drop_rules = Rules(values)
        if rule.reason:
            self._set_aside()
        self.changed_services |= rule.affected(self, changed)
        return True

    def _set_aside(self) -> None:
        self.aside = {}
        for fact, rule in FACTS.items():
            if rule.reason:
                for name, place in self.observed[fact]:
                    self.aside.setdefault(name, {})[place] = rule.reason

    def set_aside(self, name: PortName) -> endpoints.SetAside:
        """Return the endpoints of a service port that this node sets aside."""
        return self.aside.get(name, endpoints.NONE_SET_ASIDE)

    def set_former_servers(self, servers: frozenset[tuple[Address, int]]) -> None:
        """Set the API servers that an earlier agent has left, until their slices are received."""
        self._servers = self._servers or servers
        self.changed_services |= self.renew_api_places()

    def renew_api_places(self) -> set[Key]:
        """Compute the places of API servers; return the Services for which they have changed."""
        slices = self._stored_slices(KUBERNETES)
        if not self.admission.keeps_api_servers or any(map(api_servers.has_ready, slices)):
            self._of_servers = slices  # otherwise the last ones stay: an outage empties nothing
        self._servers = api_servers.endpoints_of(self._of_servers) or self._servers
        reached, own = self.observed[Fact.REACHED_SERVERS], self.observed[Fact.OWN_ADDRESSES]
        before, now = self.api_places, api_places(reached, self._servers, own)
        self.api_places, wanted = now, before.taken | now.taken
        if now == before:
            return set()
        return {
            key
            for key, ports in self.services.items()
            if any(not wanted.isdisjoint(port.places) for port in ports)
        }

    def apply(self, event: ObjectEvent) -> Applied:
        """Change the state; add affected services to ``changed_services``."""
        services = _stored(event, Kind.SERVICE, self.services)
        slices = _stored(event, Kind.ENDPOINT_SLICE, self.slices)
        warnings = self._apply(event)
        changes = {key: SliceChange(before, self.slices.get(key)) for key, before in slices.items()}
        return Applied(
            len(services),
            frozenset(k for k, before in services.items() if self.services.get(k) is not before),
            {key: change for key, change in changes.items() if change.after is not change.before},
            tuple(warnings),
        )

    def counts(self, event: ObjectEvent) -> bool:
        """Whether an event may matter to this node's maps: that of another Node does not."""
        if isinstance(event, Replaced) or event.kind is not Kind.NODE:
            return True
        return event.key.name == self.node_name

    def warnings(self) -> Iterator[tuple[str, str]]:
        """Yield each object with an unserved part, and the reason."""
        return ((f"{kind} {key}", "; ".join(its)) for (kind, key), its in self._warnings.items())

    def warnings_of(self, service: Key) -> tuple[str, ...]:
        """Return the problems that concern only parts of a Service."""
        return self._warnings.get((Kind.SERVICE, service), ())

    def take_changed_services(self) -> set[Key]:
        """Return the services that have changed since the last call."""
        changed, self.changed_services = self.changed_services, set()
        return changed

    def slices_of_ports(self, service: Key) -> endpoints.SlicesOfPorts:
        return endpoints.slices_of_ports(self.slices_for(service))

    def selecting(
        self, name: PortName, slices: list[StoredSlice]
    ) -> endpoints.Steps[endpoints.Selection]:
        """Select the endpoints that this node uses for a port, in steps; ``slices``: its own."""
        merged = yield from endpoints.merging(slices, name, self.node_name, self.set_aside(name))
        yield len(merged) // endpoints.FAST
        return endpoints.select(merged, endpoints.Topology(self.node_name, self.zone))

    def slices_for(self, service: Key) -> tuple[StoredSlice, ...]:
        """Return the slices that count for a Service."""
        return self._of_servers if service == KUBERNETES else self._stored_slices(service)

    def _stored_slices(self, service: Key) -> tuple[StoredSlice, ...]:
        return tuple([self.slices[key] for key in self.slices_of.get(service, ())])

    def _apply(self, event: ObjectEvent) -> list[ObjectWarning]:
        match event:
            case Replaced():
                return self._replace(event)
            case Changed(kind, key, found):
                return self._change(kind, key, found)
            case Removed(kind, key):
                self._remove(kind, key)
                return []

    def _replace(self, event: Replaced) -> list[ObjectWarning]:
        stored = {
            Kind.SERVICE: self.services.keys(),
            Kind.ENDPOINT_SLICE: self.slices.keys(),
            Kind.SERVICE_CIDR: self.ranges.keys(),
            Kind.NODE: {Key("", name) for name in self.claims.nodes},
        }
        invalid = {key for kind, key in self.invalid if kind is event.kind}
        for key in (stored.get(event.kind, set()) | invalid) - event.objects.keys():
            self._remove(event.kind, key)
        self.listed.add(event.kind)
        return [
            warning
            for key, found in event.objects.items()
            for warning in self._change(event.kind, key, found)
        ]

    def _change(self, kind: Kind, key: Key, found: ReadObject) -> list[ObjectWarning]:
        self.invalid.pop((kind, key), None)
        try:
            texts = self._new_warnings(kind, key, self._store(key, found))
        except Exception as error:  # a mistake of the program stops no other object either
            text = str(error if isinstance(error, InvalidObject) else unexpected(error))
            self.invalid[kind, key] = text
            if kind is Kind.SERVICE and self.admission.pools:
                self._give_back(key, found)
            return [ObjectWarning(kind, key, found.source, text, self.effect(kind, key))]
        return [ObjectWarning(kind, key, found.source, text) for text in texts]

    def _give_back(self, key: Key, found: ReadObject) -> None:
        """Serve an invalid Service at no address of the pools that it no longer has."""
        ports = self.services.get(key, ())
        if ports != (fewer := given_back(ports, self.admission.pools, found.object)):
            self.services[key] = fewer
            self.changed_services.add(key)

    def _new_warnings(self, kind: Kind, key: Key, now: tuple[str, ...]) -> Iterable[str]:
        """Return the warnings that the object's last version did not have."""
        before = self._warnings.pop((kind, key), ())
        if now:
            self._warnings[kind, key] = now
        return [text for text in now if text not in before]

    def effect(self, kind: Kind, key: Key) -> str:
        """Return the consequence for an invalid object."""
        stored: Mapping[Kind, Container[Key]] = {
            Kind.SERVICE: self.services,
            Kind.ENDPOINT_SLICE: self.slices,
            Kind.SERVICE_CIDR: self.ranges,
            Kind.NODE: [key] if self.node else [],
        }
        return STAYS if key in stored[kind] else IGNORED

    def _store(self, key: Key, found: ReadObject) -> tuple[str, ...]:
        """Store the object; return the texts of warnings.

        Raises InvalidObject without changing anything.
        """
        match found.object:
            case InvalidObject(field=field, reason=reason):
                # Raise a new exception: each raise adds stack frames to the exception object.
                raise InvalidObject(field, reason)
            case Service() as service:
                return self._store_service(key, service)
            case EndpointSlice() as slice:
                return self._store_slice(key, endpoint_slices.read(slice))
            case ReadSlice() as read:
                return self._store_slice(key, read)
            case Node() as node:
                return self._store_node(node)
            case ServiceCIDR() as cidr:
                self.ranges[key] = nodes.read_service_cidrs(cidr)
                self.service_cidrs = self._service_cidrs()
                return ()

    def _store_service(self, key: Key, service: Service) -> tuple[str, ...]:
        ports, warnings = services.parse(service, self.admission, self.services.get(key, ()))
        if (local := self.admission.local_api_server) and key == KUBERNETES:
            ports = services.with_loopback(ports, local)
        if (which := self.admission.whole_addresses) is not WholeAddresses.NONE:
            ports = services.with_whole_addresses(ports, which)
        self.claims.store(key, service)
        self.labels.pop(key, None)
        if labels := service.metadata.labels:
            self.labels[key] = show_labels(labels)
        if ports != (former_ports := self.services.get(key)):
            self.services[key] = ports
            self.changed_services.add(key)
            for wanting, wants in self._wanting:
                wanting.discard(key)
                if any(map(wants, ports)):
                    wanting.add(key)
            self.node_local.name(key, ports)
            if any(map(_is_observed, (*ports, *(former_ports or ())))):
                for watch in self.watches:
                    watch.want(True)
        return warnings

    def _store_slice(self, key: Key, read: ReadSlice) -> tuple[str, ...]:
        former, (stored, warnings) = self.slices.get(key), read
        if former is not None and stored == former:
            return warnings
        if former is not None and stored is not None:
            stored = endpoint_slices.reused(stored, former)
        self._drop_slice(key)
        if stored is not None:
            self.slices[key] = stored
            self.slices_of.setdefault(stored.service, {})[key] = None
            self.changed_services.add(stored.service)
            if stored.service == KUBERNETES:
                self.changed_services |= self.renew_api_places()
        return warnings

    def _service_cidrs(self) -> frozenset[Network]:
        """Return the ranges; no range if another proxy serves Services too.

        Addresses that are unknown here may belong to the other proxy's Services.
        """
        if not self.admission.served.is_all:
            return frozenset()
        return frozenset(network for ranges in self.ranges.values() for network in ranges)

    def _store_node(self, node: Node) -> tuple[str, ...]:
        self.claims.store_node(node)
        if node.metadata.name != self.node_name:
            return ()
        self.node = node
        zone = nodes.zone(node)
        if zone != self.zone:
            self.zone = zone
            self.changed_services |= self.services.keys()
        primary = nodes.primary_addresses([*self._bind_addresses, *nodes.addresses(node)])
        if primary != self.primary:
            self.primary = primary
            # Only to these the node's own address matters (kube-proxy.md 7).
            self.changed_services |= {
                key
                for key, ports in self.services.items()
                if any(port.source_ranges for port in ports)
            }
        return ()

    def _remove(self, kind: Kind, key: Key) -> None:
        """Remove the object; a deleted Node keeps its last state (kube-proxy.md 13.1)."""
        self.invalid.pop((kind, key), None)
        self._warnings.pop((kind, key), None)
        if kind is Kind.SERVICE:
            self.labels.pop(key, None)
            for wanting, _ in self._wanting:
                wanting.discard(key)
            self.node_local.name(key, ())
            self.claims.drop(key)
            if self.services.pop(key, None) is not None:
                self.changed_services.add(key)
        elif kind is Kind.ENDPOINT_SLICE:
            self._drop_slice(key)
        elif kind is Kind.NODE:
            self.claims.drop_node(key.name)
        elif kind is Kind.SERVICE_CIDR:
            self.ranges.pop(key, None)
            self.service_cidrs = self._service_cidrs()

    def _drop_slice(self, key: Key) -> None:
        before = self.slices.pop(key, None)
        if before is None:
            return
        service = before.service
        self.changed_services.add(service)
        others = self.slices_of[service]
        del others[key]
        if not others:
            del self.slices_of[service]
        if service == KUBERNETES:
            self.changed_services |= self.renew_api_places()


def _stored(
    event: ObjectEvent, kind: Kind, stored: Mapping[Key, _Stored]
) -> dict[Key, _Stored | None]:
    """Return the stored objects of a kind that an event is about; None: not stored."""
    match event:
        case Replaced(of, objects) if of is kind:
            return {key: stored.get(key) for key in stored.keys() | objects.keys()}
        case Changed(of, key) | Removed(of, key) if of is kind:
            return {key: stored.get(key)}
    return {}


def _has_passive_health(port: ServicePort) -> bool:
    return port.endpoint_health != HEALTH_OFF


def _is_rebalanced(port: ServicePort) -> bool:
    return port.rebalance is not None


def _keeps_client(port: ServicePort) -> bool:
    return port.hands_over and not port.external_local


_WANTS = _has_passive_health, _is_rebalanced, _keeps_client


def _is_observed(port: ServicePort) -> bool:
    """Whether the node observes endpoints, a listener or connections of the port itself."""
    return port.node_local is not None or _has_passive_health(port) or _is_rebalanced(port)
