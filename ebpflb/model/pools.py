# SPDX-License-Identifier: Apache-2.0
"""Pools of load balancer addresses (--l2-pool), and what a Service asks of them.

Services with ``loadBalancerClass: ebpflb.io/l2`` get addresses from the pools. A Service may ask
for certain addresses, and share an address with other Services of its namespace that have other
ports, by annotations: ours, or those that MetalLB and kube-vip have for the same purpose.
"""

from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from typing import NamedTuple

from ebpflb.errors import InvalidObject
from ebpflb.model import addresses, objects
from ebpflb.model.addresses import Address, Family
from ebpflb.model.events import Key
from ebpflb.model.services import Requirement, parse_requirements, show_requirements

CLASS = "ebpflb.io/l2"
MOST_ADDRESSES = 1024  # that all Services together have (the map ``answered``)

Labels = Mapping[str, str]
Port = tuple[str, int]  # protocol and number


class Range(NamedTuple):
    """The addresses from ``first`` to ``last``, both of one family."""

    first: Address
    last: Address

    def __contains__(self, address: object) -> bool:
        is_same = isinstance(address, type(self.first))
        return is_same and int(self.first) <= int(address) <= int(self.last)  # type: ignore[call-overload]

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    def each(self) -> Iterator[Address]:
        for number in range(int(self.first), int(self.last) + 1):
            yield type(self.first)(number)


class Pool(NamedTuple):
    """Addresses for the Services of namespaces with these labels; no label: of all namespaces."""

    ranges: tuple[Range, ...]
    selector: tuple[Requirement, ...] = ()

    def __str__(self) -> str:
        ranges = ",".join(map(str, self.ranges))
        return f"{ranges}@{show_requirements(self.selector)}" if self.selector else ranges

    def serves(self, labels: Labels) -> bool:
        """Whether Services of a namespace with these labels get addresses from the pool."""
        return all(each.holds(dict(labels)) for each in self.selector)

    def __contains__(self, address: object) -> bool:
        return any(address in each for each in self.ranges)


Pools = tuple[Pool, ...]


def parse_pools(texts: tuple[str, ...]) -> Pools:
    """Parse RANGE,...[@SELECTOR] each; a range is FIRST-LAST, a CIDR or an address.

    Raises ValueError.
    """
    return tuple(map(_parse_pool, texts))


def show_pools(pools: Pools) -> str:
    return " ".join(map(str, pools))


def _parse_pool(text: str) -> Pool:
    ranges, has_selector, selector = text.partition("@")
    required = parse_requirements(selector)
    if has_selector and not required:
        raise ValueError(f'"{text}" has no label after @')
    return Pool(tuple(_parse_range(part.strip()) for part in ranges.split(",")), required)


def _parse_range(text: str) -> Range:
    if "/" in text:
        return _hosts(text)
    first, dash, last = text.partition("-")
    begin = addresses.parse_frontend(first.strip())
    end = addresses.parse_frontend(last.strip(), addresses.family(begin)) if dash else begin
    if int(begin) > int(end):
        raise ValueError(f'"{text}" ends before it begins')
    return Range(begin, end)


def _hosts(text: str) -> Range:
    """Return the addresses of a network that a host may have: not its first, nor its broadcast."""
    network = addresses.parse_network(text)
    first, last = int(network.network_address), int(network.broadcast_address)
    if last - first > 1:
        first, last = first + 1, last - (network.version == 4)
    begin, end = (ip_address(type(network.network_address)(it)) for it in (first, last))
    addresses.parse_frontend(str(begin))
    return Range(begin, end)


class Claim(NamedTuple):
    """A Service of our class: what it asks for, and has.

    ``version`` is its resourceVersion. ``wanted`` are the addresses that it asks for, at most one
    of a family; ``sharing`` the name under which it shares an address, or "". ``local``: only nodes
    with an endpoint serve clients outside. ``held`` are the addresses in its status. ``problem``
    says why it gets no new one.
    """

    key: Key
    created: str
    uid: str
    version: str
    families: tuple[Family, ...]
    wanted: tuple[Address, ...] = ()
    sharing: str = ""
    ports: frozenset[Port] = frozenset()
    local: bool = False
    held: tuple[Address, ...] = ()
    problem: str = ""

    @property
    def age(self) -> tuple[str, str, Key]:
        """The order in which Services get addresses: the oldest first."""
        return self.created, self.uid, self.key


def read_claim(service: objects.Service) -> Claim | None:
    """Return the claim of a Service; None if it is not of our class, or is being deleted."""
    spec, meta = service.spec, service.metadata
    if spec.load_balancer_class != CLASS or spec.type != "LoadBalancer" or meta.deletion_timestamp:
        return None
    try:
        wanted, problem = _wanted(service), ""
    except InvalidObject as error:
        wanted, problem = (), str(error)
    return Claim(
        Key(meta.namespace, meta.name),
        meta.creation_timestamp or "",
        meta.uid,
        meta.resource_version,
        _families(spec),
        wanted,
        _annotation(meta, objects.SHARED_IP)[1],
        frozenset((port.protocol, port.port) for port in spec.ports or ()),
        spec.external_traffic_policy == "Local",
        _held(service),
        problem,
    )


def _annotation(meta: objects.Annotated, names: tuple[str, ...]) -> tuple[str, str]:
    """Return the first of the annotations that is set, and its name."""
    for name in names:
        if text := meta.annotation(name):
            return f"metadata.annotations[{name}]", text
    return "", ""


def _wanted(service: objects.Service) -> tuple[Address, ...]:
    """Return the addresses that the Service asks for. Raises InvalidObject."""
    field, text = _annotation(service.metadata, objects.WANTED_IPS)
    if not text:
        field, text = "spec.loadBalancerIP", service.spec.load_balancer_ip or ""
    texts = [part.strip() for part in text.split(",")] if text else []
    found = {
        addresses.family(it): it
        for it in (objects.parsed(field, addresses.parse_frontend, part) for part in texts[:3])
    }
    if len(found) < len(texts):
        raise InvalidObject(field, "names more than one address of a family")
    return tuple(found.values())


def _families(spec: objects.ServiceSpec) -> tuple[Family, ...]:
    known = [
        addresses.FAMILIES[each] for each in spec.ip_families or () if each in addresses.FAMILIES
    ]
    if not known:
        known = [Family.IPV6 if ":" in spec.cluster_ip else Family.IPV4]
    return tuple(dict.fromkeys(known))


def _held(service: objects.Service) -> tuple[Address, ...]:
    """Return the readable addresses of the status; a written one is never unreadable."""
    balancer = service.status.load_balancer if service.status else None
    found = []
    for each in ((balancer.ingress if balancer else None) or ())[: len(Family)]:
        try:
            found.append(addresses.parse_frontend(each.ip or ""))
        except ValueError:
            continue
    return tuple(found)
