# SPDX-License-Identifier: Apache-2.0
"""One Service -> its service ports, one per port and family (kube-proxy.md 1).

A service port has a name, the addresses and ports of its frontends, and the policies that select an
endpoint. A Service without a cluster IP of a family has no service ports of that family.

kube-proxy relies on the API server's validation, but manifests skip it. So an invalid field raises
InvalidObject with its path. An entry that kube-proxy skips with a log line is skipped here too,
with a warning.

Next: endpoints.py finds the endpoints of a service port, and those that are used.
"""

import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from msgspec import Struct

from ebpflb import errors
from ebpflb.model import addresses, annotations, objects
from ebpflb.model.addresses import Address, Family, Network
from ebpflb.model.events import Key
from ebpflb.model.objects import Metadata

if TYPE_CHECKING:
    from ebpflb.model.pools import Pool

# Which of a Service's externalIPs are served.
#
# Anyone who may write a Service can claim any address by spec.externalIPs, and so receive the
# traffic that this node and its pods send to it (CVE-2020-8554). Kubernetes prevents this with an
# admission plugin (DenyServiceExternalIPs); here it is prevented on the node, for existing Services
# too.


class ExternalIps(Struct, frozen=True):
    """The addresses that --external-ips allows.

    ``networks`` is None if every address is allowed.
    """

    networks: tuple[Network, ...] | None = None

    def of(self, listed: list[Address], warnings: list[str]) -> list[Address]:
        """Return the allowed addresses; add a warning for each of the others."""
        warnings += [
            f"spec.externalIPs: {ip} is not served: --external-ips={self}"
            for ip in listed
            if not self._allow(ip)
        ]
        return [address for address in listed if self._allow(address)]

    def _allow(self, address: Address) -> bool:
        return self.networks is None or any(address in network for network in self.networks)

    def __str__(self) -> str:
        """The value of --external-ips."""
        if self.networks is None:
            return "all"
        return ",".join(map(str, self.networks)) or "none"


ALL_EXTERNAL_IPS, NO_EXTERNAL_IPS = ExternalIps(), ExternalIps(())


def parse_external_ips(text: str) -> ExternalIps:
    """Parse ``all``, ``none`` or CIDRs of both families, separated by commas. Raises ValueError."""
    words = {str(each): each for each in (ALL_EXTERNAL_IPS, NO_EXTERNAL_IPS)}
    if text in words:
        return words[text]
    parts = [part.strip() for part in text.split(",")]
    try:
        return ExternalIps(tuple(addresses.parse_network(part) for part in parts))
    except ValueError as error:
        raise ValueError(f"neither all nor none nor CIDRs: {error}") from error


# Which Services are served here; the others are left to a kube-proxy on the same node.
#
# Selectors have kubectl's -l syntax: requirements separated by commas, all of which must hold.

_NAME = r"[A-Za-z0-9](?:[-A-Za-z0-9_.]*[A-Za-z0-9])?"
_KEY = rf"(?:{_NAME}/)?{_NAME}"
_VALUE = rf"(?:{_NAME})?"
_REQUIREMENT = re.compile(
    rf"(?P<absent>!)?\s*(?P<key>{_KEY})\s*"
    rf"(?:(?P<operator>==?|!=)\s*(?P<value>{_VALUE})"
    rf"|(?P<set>in|notin)\s*\((?P<values>[^()]*)\))?"
)
_COMMA_OUTSIDE_OF_SETS = re.compile(r",(?![^()]*\))")
_DNS_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_EXAMPLE = "app=web,tier!=db,stage in (test,canary),!legacy"


class Requirement(NamedTuple):
    """A label and its allowed values. ``values`` is None if only the label's presence matters.

    As in the API, an absent label has none of the values, so a negated requirement holds.
    """

    text: str
    key: str
    values: frozenset[str] | None
    negated: bool

    def holds(self, labels: dict[str, str]) -> bool:
        value = labels.get(self.key)
        found = value is not None if self.values is None else value in self.values
        return found != self.negated


class ServedServices(Struct, frozen=True):
    """Services in one of ``namespaces`` (empty: all) whose labels meet all of ``selector``."""

    namespaces: frozenset[str] = frozenset()
    selector: tuple[Requirement, ...] = ()

    @property
    def is_all(self) -> bool:
        return not (self.namespaces or self.selector)

    def has(self, metadata: Metadata) -> bool:
        if self.namespaces and metadata.namespace not in self.namespaces:
            return False
        labels = metadata.labels or {}
        return all(requirement.holds(labels) for requirement in self.selector)

    def __str__(self) -> str:
        """The options --namespaces and --services for this selection."""
        namespaces = show_namespaces(self.namespaces)
        parts = [f"--namespaces={namespaces}"] if namespaces else []
        return " ".join(
            parts + [f"--services={show_requirements(self.selector)}"] * bool(self.selector)
        )


ALL_SERVICES = ServedServices()


def parse_namespaces(text: str) -> frozenset[str]:
    """Parse names separated by commas; "" means all namespaces. Raises ValueError."""
    names = _parts(text.split(","))
    for name in names:
        if not _DNS_LABEL.fullmatch(name):
            raise ValueError(f'"{name}" is not the name of a namespace')
    return frozenset(names)


def show_namespaces(namespaces: frozenset[str]) -> str:
    """The inverse of ``parse_namespaces``."""
    return ",".join(sorted(namespaces))


def parse_requirements(text: str) -> tuple[Requirement, ...]:
    """Parse a label selector; "" selects everything. Raises ValueError."""
    return tuple(_requirement(part) for part in _parts(_COMMA_OUTSIDE_OF_SETS.split(text)))


def show_requirements(selector: tuple[Requirement, ...]) -> str:
    """The inverse of ``parse_requirements``."""
    return ",".join(requirement.text for requirement in selector)


def meets(selector: tuple[Requirement, ...], labels: str) -> bool:
    """Whether ``labels``, as ``show_labels`` writes them, meet the selector."""
    found = dict(pair.split("=", 1) for pair in labels.split(",") if pair)
    return all(requirement.holds(found) for requirement in selector)


def show_labels(labels: dict[str, str]) -> str:
    """Return the labels as kubectl shows them.

    Neither names nor values contain commas, and names contain no equals sign.
    """
    return ",".join(f"{name}={value}" for name, value in labels.items())


def _parts(parts: list[str]) -> list[str]:
    if len(parts) == 1 and not parts[0].strip():
        return []
    return [part.strip() for part in parts]


def _requirement(text: str) -> Requirement:
    found = _REQUIREMENT.fullmatch(text)
    compared = found and (found["operator"] or found["set"])
    if not found or (found["absent"] and compared):
        raise ValueError(f'"{text}" is not a label selector requirement such as {_EXAMPLE}')
    if not compared:
        return Requirement(text, found["key"], None, bool(found["absent"]))
    listed = [found["value"]] if found["operator"] else found["values"].split(",")
    values = frozenset(value.strip() for value in listed)
    if not all(re.fullmatch(_VALUE, value) for value in values):
        raise ValueError(f'"{text}" has a value that is not a valid label value')
    return Requirement(text, found["key"], values, compared in ("!=", "notin"))


# The operator's settings for Services on this node; Services may override some of them.


class WholeAddresses(StrEnum):
    """Which addresses the programs must know as a whole: for pings, or for unknown ports."""

    NONE = "none"
    BALANCED = "load balancers'"
    ALL = "all"


class Admission(Struct, frozen=True):
    """The operator's settings for Services.

    ``serve_external_ips`` is kube-proxy's gate AllowServiceExternalIPs: without it externalIPs are
    not served, but still count for the policies (kube-proxy.md 1.4). ``nodeport_source_ranges``,
    ``scheduler`` and ``endpoint_health`` apply to Services without the annotation (annotations.py),
    which may name ``node_local_addresses``.
    Services that are not ``served`` belong to another proxy. ``local_api_server`` is a loopback
    address and port at which the node's own processes reach the API servers.
    ``keeps_api_servers``: the Service default/kubernetes never loses its last ready endpoint, and
    has passive endpoint health. ``whole_addresses``: for which addresses Services stand as a whole.
    ``pools``: addresses that a Service gets only from the agents; as externalIPs they do not count.
    ``hand_over``: which Services' requests may be handed to other nodes, without the annotation.
    """

    serve_external_ips: bool = True
    external_ips: ExternalIps = ALL_EXTERNAL_IPS
    nodeport_source_ranges: tuple[Network, ...] = ()
    served: ServedServices = ALL_SERVICES
    scheduler: str = annotations.RANDOM
    local_api_server: tuple[Address, int] | None = None
    keeps_api_servers: bool = False
    endpoint_health: str = annotations.HEALTH_OFF
    node_local_addresses: tuple[Address, ...] = annotations.NODE_LOCAL_DNS
    whole_addresses: WholeAddresses = WholeAddresses.NONE
    pools: "tuple[Pool, ...]" = ()
    hand_over: str = annotations.HAND_OVER_OFF

    @property
    def hands_over(self) -> bool:
        return self.hand_over != annotations.HAND_OVER_OFF

    def health_of(self, service: Key) -> str:
        """Return the default of a Service's endpoint health."""
        is_kept = self.keeps_api_servers and service == KUBERNETES
        return annotations.HEALTH_PASSIVE if is_kept else self.endpoint_health


OF_KUBE_PROXY = Admission()


PROXY_NAME_LABEL = "service.kubernetes.io/service-proxy-name"  # if present: another proxy serves it
DEFAULT_AFFINITY_SECONDS = 10800  # 3 hours, the API's default
MAX_AFFINITY_SECONDS = 86400  # a day

# For one Service; the API allows more. Each list is cut before anything is made from it.
MOST_PORTS, MOST_SOURCE_RANGES, MOST_ADDRESSES = 1000, 1000, 1000

_EXTERNAL = {"ClusterIP": False, "NodePort": True, "LoadBalancer": True, "ExternalName": False}
_STICKY = {"None": False, "ClientIP": True}
_LOCAL = {"Cluster": False, "Local": True}

_LIMIT = "too many"
_Entry = TypeVar("_Entry")
_Parsed = TypeVar("_Parsed", Address, Network)
_Lists = dict[Family, tuple[_Parsed, ...]]


class Protocol(IntEnum):
    """The IP protocol numbers."""

    TCP = 6
    UDP = 17
    SCTP = 132


PROTOCOLS = {protocol.name: protocol for protocol in Protocol}


class PortName(NamedTuple):
    """The identity of a service port; contains the port's name, not its number."""

    namespace: str
    service: str
    port: str
    protocol: Protocol
    family: Family

    def __str__(self) -> str:
        return f"{self.owner}:{self.port}" if self.port else str(self.owner)

    @property
    def owner(self) -> Key:
        """The Service that has this port."""
        return Key(self.namespace, self.service)


# The service port whose endpoints are the cluster's API servers: a PortName without its family.
API_SERVERS = ("default", "kubernetes", "https", Protocol.TCP)
KUBERNETES = Key(*API_SERVERS[:2])


@dataclass(frozen=True, slots=True)
class ServicePort:
    """One port of one Service in one family; every address is of that family.

    ``created`` is the creationTimestamp or "". Zero means none for ``node_port``,
    ``health_check_node_port`` and ``affinity_seconds``. Empty source ranges admit every client.
    ``external_local`` applies to the Service, and matters only if ``externally_accessible``.
    ``reset_after``: seconds until connections to a removed endpoint are reset; None: never.
    ``slow_start``: seconds in which the weight of a new endpoint grows to its full value.
    ``endpoint_health``: one of ENDPOINT_HEALTH, how endpoints that do not answer are noticed.
    ``type``: the Service's spec.type; it decides nothing here.
    ``loopback``: another frontend, for the node's own processes.
    ``node_local``: the address of a listener on the node that serves sockets while it answers.
    ``passthrough``: what finds no endpoint at an external address goes on to the router.
    ``rebalance``: which idle connections of sockets move to new endpoints; None: none.
    ``whole_addresses``: those of its addresses for which it stands as a whole: for pings, and for
    ports that no Service has.
    ``limit``: which part of the Service is beyond a limit; only its first port has it.
    ``hands_over``: requests may be handed to other nodes (hand_over.py).
    """

    name: PortName
    created: str
    cluster_ip: Address
    port: int
    node_port: int
    external_ips: tuple[Address, ...]
    load_balancer_ips: tuple[Address, ...]
    source_ranges: tuple[Network, ...]
    nodeport_source_ranges: tuple[Network, ...]
    affinity_seconds: int
    internal_local: bool
    external_local: bool
    health_check_node_port: int
    scheduler: str = annotations.RANDOM
    reset_after: float | None = None
    slow_start: float = 0.0
    endpoint_health: str = annotations.HEALTH_OFF
    type: str = "ClusterIP"
    loopback: tuple[Address, int] | None = None
    node_local: Address | None = None
    passthrough: bool = False
    rebalance: annotations.Rebalance | None = None
    whole_addresses: tuple[Address, ...] = ()
    limit: str = ""
    hands_over: bool = False

    @property
    def externally_accessible(self) -> bool:
        return bool(self.node_port or self.load_balancer_ips or self.external_ips)

    @property
    def frontend_count(self) -> int:
        """The most frontends that it has: an address may be listed twice."""
        external = len(self.external_ips) + len(self.load_balancer_ips)
        others = bool(self.node_port) + (self.loopback is not None) + len(self.whole_addresses)
        return 1 + external + others

    @property
    def places(self) -> list[tuple[Address, int]]:
        """The addresses and ports of its frontends; a NodePort has the unspecified address."""
        addresses = (self.cluster_ip, *self.external_ips, *self.load_balancer_ips)
        nodeport = [(type(self.cluster_ip)(0), self.node_port)] if self.node_port else []
        return [*((address, self.port) for address in addresses), *nodeport]


_Ports = tuple[ServicePort, ...]


class ParsedService(NamedTuple):
    """The service ports, and a line for each entry that was skipped."""

    ports: tuple[ServicePort, ...]
    warnings: tuple[str, ...]


_NO_CLUSTER_IP = (
    'spec.clusterIP: missing, so it is not served: a manifest must name one, or "None" if headless'
)
_NONE, _NONE_WITHOUT_IP = ParsedService((), ()), ParsedService((), (_NO_CLUSTER_IP,))


def is_ours(service: objects.Service) -> bool:
    """Whether the Service is served: not another proxy's, not headless, not a mere DNS alias.

    See kube-proxy.md 1.1 and 1.2.
    """
    spec = service.spec
    return (
        PROXY_NAME_LABEL not in (service.metadata.labels or {})
        and spec.cluster_ip not in ("", "None")
        and spec.type != "ExternalName"
    )


def parse(
    service: objects.Service, admission: Admission = OF_KUBE_PROXY, former: _Ports = ()
) -> ParsedService:
    """Return the service ports (kube-proxy.md 1); raises InvalidObject for an invalid field.

    ``former``: those of its last version; equal lists stay the same objects, compared at once.
    """
    if not (is_ours(service) and admission.served.has(service.metadata)):
        return _NONE_WITHOUT_IP if _lacks_cluster_ip(service, admission) else _NONE
    warnings: list[str] = []
    ports = tuple(_service_ports(service, admission, former, warnings))
    return _limited(ports, warnings)


def _service_ports(
    service: objects.Service, admission: Admission, former: _Ports, warnings: list[str]
) -> Iterator[ServicePort]:
    key, spec = _key(service.metadata), service.spec
    cluster_ips = _cluster_ips(spec, warnings)
    external_ips, balanced, clients, to_nodeports = _lists(service, admission, former, warnings)
    spec_ports = _ports(spec, warnings)
    health = admission.health_of(key)
    defaults = admission.scheduler, health, admission.node_local_addresses, admission.hand_over
    annotated = annotations.read(service, *defaults, warnings)
    for family, cluster_ip in cluster_ips.items():
        node_local = next(iter(_of(family, annotated.node_local)), None)
        for port, protocol in spec_ports:
            is_tcp = protocol is Protocol.TCP
            yield ServicePort(
                name=PortName(*key, sys.intern(port.name or ""), protocol, family),
                created=service.metadata.creation_timestamp or "",
                cluster_ip=cluster_ip,
                port=port.port,
                node_port=port.node_port,
                external_ips=external_ips[family],
                load_balancer_ips=balanced[family],
                source_ranges=clients[family],
                nodeport_source_ranges=to_nodeports[family],
                affinity_seconds=_affinity_seconds(spec),
                internal_local=_is_local(
                    "spec.internalTrafficPolicy", spec.internal_traffic_policy
                ),
                external_local=_is_external_local(spec),
                health_check_node_port=_health_check_node_port(spec),
                scheduler=annotated.scheduler,
                reset_after=annotated.reset_after if is_tcp else None,
                slow_start=annotated.slow_start,
                endpoint_health=annotated.endpoint_health if is_tcp else annotations.HEALTH_OFF,
                type=sys.intern(spec.type or "ClusterIP"),
                node_local=None if protocol is Protocol.SCTP else node_local,
                passthrough=annotated.passthrough,
                rebalance=annotated.rebalanced.get(port.port) if is_tcp else None,
                hands_over=annotated.hands_over,
            )


def _limited(ports: tuple[ServicePort, ...], warnings: list[str]) -> ParsedService:
    """Note at the first port what is beyond a limit; these warnings come first."""
    limits = list(filter(_is_about_limit, warnings))
    if limits and ports:
        ports = (replace(ports[0], limit=errors.one_line(limits[0])), *ports[1:])
    others = (each for each in warnings if not _is_about_limit(each))
    return ParsedService(ports, errors.some_lines((*limits, *others)))


def with_loopback(
    ports: tuple[ServicePort, ...], loopback: tuple[Address, int]
) -> tuple[ServicePort, ...]:
    """Add the frontend to the API servers' port of the same family."""
    wanted = (*API_SERVERS, loopback[0].version)
    return tuple(replace(it, loopback=loopback) if it.name == wanted else it for it in ports)


def with_whole_addresses(
    ports: tuple[ServicePort, ...], which: WholeAddresses
) -> tuple[ServicePort, ...]:
    """Let the first port of each family stand for the Service's addresses."""
    first = _first_ports(ports)
    return tuple(
        replace(it, whole_addresses=_whole(it, which)) if it is first[it.name.family] else it
        for it in ports
    )


def _first_ports(ports: tuple[ServicePort, ...]) -> dict[Family, ServicePort]:
    return {port.name.family: port for port in reversed(ports)}


def _whole(port: ServicePort, which: WholeAddresses) -> tuple[Address, ...]:
    if which is WholeAddresses.ALL:
        return (*port.external_ips, *port.load_balancer_ips, port.cluster_ip)
    return port.load_balancer_ips


def _name(field: str, text: str) -> str:
    return objects.short(field, objects.filled(field, text))


def _key(meta: Metadata) -> Key:
    """Return the Service's key. Raises InvalidObject."""
    namespace = sys.intern(_name("metadata.namespace", meta.namespace))
    return Key(namespace, _name("metadata.name", meta.name))


def _lacks_cluster_ip(service: objects.Service, admission: Admission) -> bool:
    """Whether a served Service lacks a cluster IP; possible only in a manifest."""
    is_wanted = PROXY_NAME_LABEL not in (service.metadata.labels or {})
    is_wanted &= service.spec.type != "ExternalName" and admission.served.has(service.metadata)
    return is_wanted and not service.spec.cluster_ip


def _first(
    entries: Sequence[_Entry], most: int, field: str, warnings: list[str]
) -> Sequence[_Entry]:
    """Return the first ``most`` entries; add a warning if there are more."""
    if len(entries) > most:
        warnings.append(f"{field}: {_LIMIT}: the first {most} of {len(entries)} are used")
    return entries[:most]


def _is_about_limit(message: str) -> bool:
    """Whether a warning is about a limit of one Service."""
    return f": {_LIMIT}: " in message


def _lists(
    service: objects.Service, admission: Admission, former: _Ports, warnings: list[str]
) -> tuple[_Lists[Address], _Lists[Address], _Lists[Network], _Lists[Network]]:
    """Return external IPs, load balancer IPs, their clients, and NodePorts' clients, by family."""
    first = _first_ports(former).values()
    external = _by_family(_external_ips(service.spec, admission, warnings))
    balanced = _by_family(_load_balancer_ips(service, warnings))
    clients = _source_ranges(service.spec, warnings)
    to_nodeports = _nodeport_ranges(service, admission, warnings)
    return (
        _kept(external, [it.external_ips for it in first]),
        _kept(balanced, [it.load_balancer_ips for it in first]),
        _kept(clients, [it.source_ranges for it in first]),
        _kept(to_nodeports, [it.nodeport_source_ranges for it in first]),
    )


def _external_ips(
    spec: objects.ServiceSpec, admission: Admission, warnings: list[str]
) -> list[Address]:
    listed = spec.external_ips or () if admission.serve_external_ips else ()
    used = _first(listed, MOST_ADDRESSES, "spec.externalIPs", warnings)
    found = _parsed(addresses.parse_frontend, "spec.externalIPs[{}]", used, warnings)
    pooled = {it for it in found if any(pool.has(it) for pool in admission.pools)}
    warnings += [f"spec.externalIPs: {it} is not served: --l2-pool has it" for it in pooled]
    return admission.external_ips.of([it for it in found if it not in pooled], warnings)


def _load_balancer_ips(service: objects.Service, warnings: list[str]) -> list[Address]:
    """Return the addresses; with ipMode Proxy traffic goes to the load balancer instead."""
    balancer = service.status.load_balancer if service.status else None
    listed = (balancer.ingress if balancer else None) or ()
    used = _first(listed, MOST_ADDRESSES, "status.loadBalancer.ingress", warnings)
    ips = (each.ip or "" if each.ip_mode in (None, "VIP") else "" for each in used)
    return _parsed(addresses.parse_frontend, "status.loadBalancer.ingress[{}].ip", ips, warnings)


def _cluster_ips(spec: objects.ServiceSpec, warnings: list[str]) -> dict[Family, Address]:
    """Return the cluster IP by family (kube-proxy.md 1.3).

    clusterIPs pairs with ipFamilies; without ipFamilies clusterIP is used.
    """
    ips = spec.cluster_ips or []
    if not spec.ip_families:
        if len(ips) > 1:
            warnings.append("spec.ipFamilies: empty, so only spec.clusterIP is used")
        only = objects.parsed("spec.clusterIP", addresses.parse_frontend, spec.cluster_ip)
        return {addresses.family(only): only}
    found: dict[Family, Address] = {}
    for index, text in enumerate(spec.ip_families[: len(Family)]):  # the API allows no more
        family = objects.one_of(f"spec.ipFamilies[{index}]", text, addresses.FAMILIES)
        if index < len(ips):
            parse = partial(addresses.parse_frontend, wanted=family)
            field = f"spec.clusterIPs[{index}]"
            found.setdefault(family, objects.parsed(field, parse, ips[index]))
        else:
            warnings.append(f"spec.clusterIPs[{index}]: missing, so nothing is served by {family}")
    return found


def _source_ranges(
    spec: objects.ServiceSpec, warnings: list[str]
) -> dict[Family, tuple[Network, ...]]:
    listed = spec.load_balancer_source_ranges or ()
    used = _first(listed, MOST_SOURCE_RANGES, "spec.loadBalancerSourceRanges", warnings)
    texts = (each.strip() for each in used)
    field = "spec.loadBalancerSourceRanges[{}]"
    return _restricting(_parsed(addresses.parse_network, field, texts, warnings))


def _nodeport_ranges(
    service: objects.Service, admission: Admission, warnings: list[str]
) -> dict[Family, tuple[Network, ...]]:
    found = annotations.read_nodeport_ranges(service, admission.nodeport_source_ranges)
    field = annotations.annotation_field(annotations.NODEPORT_RANGES_ANNOTATION)
    return _restricting(_first(found, MOST_SOURCE_RANGES, field, warnings))


def _ports(
    spec: objects.ServiceSpec, warnings: list[str]
) -> list[tuple[objects.ServicePortSpec, Protocol]]:
    checked: dict[tuple[str, Protocol], objects.ServicePortSpec] = {}
    for index, port in enumerate(_first(spec.ports or (), MOST_PORTS, "spec.ports", warnings)):
        field = f"spec.ports[{index}]"
        objects.within(f"{field}.port", port.port, addresses.PORTS)
        if port.node_port:
            objects.within(f"{field}.nodePort", port.node_port, addresses.PORTS)
        elif spec.type == "NodePort":
            warnings.append(f"{field}.nodePort: missing, so it has none: a manifest must name it")
        protocol = objects.one_of(f"{field}.protocol", port.protocol, PROTOCOLS)
        name = objects.short(f"{field}.name", port.name or "")
        if (name, protocol) in checked:
            raise errors.InvalidObject(f"{field}.name", f'a second {protocol.name} port "{name}"')
        checked[name, protocol] = port
    return [(port, protocol) for (_, protocol), port in checked.items()]


def _parsed(
    parse: Callable[[str], _Parsed], field: str, texts: Iterable[str], warnings: list[str]
) -> list[_Parsed]:
    """Return each value once; blank entries are skipped silently, as kube-proxy does.

    ``field``: of each text, with {} for its index.
    """
    values: dict[_Parsed, None] = {}
    for index, text in enumerate(texts):
        try:
            values[parse(text)] = None
        except ValueError as error:
            if text.strip():
                warnings.append(f"{field.format(index)}: {error}")
    return list(values)


def _of(family: Family, values: Iterable[_Parsed]) -> tuple[_Parsed, ...]:
    return tuple(value for value in values if value.version == family)


def _by_family(values: Iterable[_Parsed]) -> dict[Family, tuple[_Parsed, ...]]:
    return {family: _of(family, values) for family in Family}


def _kept(found: _Lists[_Parsed], former: list[tuple[_Parsed, ...]]) -> _Lists[_Parsed]:
    """Return the lists, as the former objects where they are equal."""
    if not former:
        return found
    return {family: next((it for it in former if it == its), its) for family, its in found.items()}


_OPEN: dict[Family, tuple[Network, ...]] = dict.fromkeys(Family, ())


def _restricting(ranges: Sequence[Network]) -> dict[Family, tuple[Network, ...]]:
    """Return the ranges by family.

    A range that holds every address makes the others ineffective.
    """
    if not ranges:  # as of nearly all Services
        return _OPEN
    found = _by_family(ranges)
    is_open = {family: any(it.prefixlen == 0 for it in found[family]) for family in Family}
    return {family: () if is_open[family] else found[family] for family in Family}


def _affinity_seconds(spec: objects.ServiceSpec) -> int:
    if not objects.one_of("spec.sessionAffinity", spec.session_affinity, _STICKY):
        return 0
    client_ip = spec.session_affinity_config and spec.session_affinity_config.client_ip
    if not client_ip or client_ip.timeout_seconds is None:
        return DEFAULT_AFFINITY_SECONDS
    field = "spec.sessionAffinityConfig.clientIP.timeoutSeconds"
    return objects.within(field, client_ip.timeout_seconds, range(1, MAX_AFFINITY_SECONDS + 1))


def _is_external_local(spec: objects.ServiceSpec) -> bool:
    """Decide by the spec only: an externalIP of either family is enough, even an unreadable one."""
    local = _is_local("spec.externalTrafficPolicy", spec.external_traffic_policy)
    external = objects.one_of("spec.type", spec.type, _EXTERNAL)
    return local and (external or bool(spec.external_ips))


def _is_local(field: str, policy: str | None) -> bool:
    return objects.one_of(field, "Cluster" if policy is None else policy, _LOCAL)


def _health_check_node_port(spec: objects.ServiceSpec) -> int:
    """Return the port, or 0.

    Only a load balancer that needs to find the nodes with endpoints has one.
    """
    port = spec.health_check_node_port
    if not port or spec.type != "LoadBalancer" or not _is_external_local(spec):
        return 0
    return objects.within("spec.healthCheckNodePort", port, addresses.PORTS)


def likely_service(wanted: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown Service, by similar NAMESPACE/NAME."""
    from difflib import get_close_matches  # only errors need it

    names = sorted(known)
    close = [it for it in names if it.endswith(f"/{wanted}")] or get_close_matches(wanted, names)
    return f"did you mean {' or '.join(close)}?" if close else "see `ebpflb services list`"
