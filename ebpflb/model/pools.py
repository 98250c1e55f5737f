# SPDX-License-Identifier: Apache-2.0
"""Which Service gets which address of the operator's pools (docs/load-balancer-addresses.md).

A Service asks by ``loadBalancerClass: ebpflb.io/l2``: its ``Claim`` says for what. ``allot`` gives
every claim its addresses, always the same for the same objects: an older Service keeps what it has
(by creationTimestamp, then UID), and others get what is free. One agent writes the result.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from hashlib import blake2b
from ipaddress import IPv4Network
from itertools import pairwise
from typing import NamedTuple

from ebpflb.errors import quoted
from ebpflb.model import addresses, objects, services
from ebpflb.model.addresses import FAMILIES, Address, Family, Network
from ebpflb.model.annotations import annotation_field
from ebpflb.model.events import Key

CLASS = "ebpflb.io/l2"  # spec.loadBalancerClass
PROBED = IPv4Network("240.0.0.0/4")  # of no host (RFC 1112): each node has one, for other agents
BALANCER = "LoadBalancer"  # spec.type
MOST_ANSWERED = 1024  # addresses of all Services together


class Range(NamedTuple):
    """Addresses of one family, both ends included."""

    first: Address
    last: Address

    def has(self, address: Address) -> bool:
        same = address.version == self.first.version
        return same and int(self.first) <= int(address) <= int(self.last)

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"


class Pool(NamedTuple):
    """Addresses for the Services of namespaces with these labels; no selector: of all."""

    ranges: tuple[Range, ...]
    selector: tuple[services.Requirement, ...] = ()

    def has(self, address: Address) -> bool:
        return any(each.has(address) for each in self.ranges)

    def admits(self, labels: dict[str, str]) -> bool:
        return all(requirement.holds(labels) for requirement in self.selector)

    def __str__(self) -> str:
        selector = services.show_requirements(self.selector)
        return ",".join(map(str, self.ranges)) + (f"@{selector}" if selector else "")


Pools = tuple[Pool, ...]
Ports = tuple[services.ServicePort, ...]


def parse_pools(texts: Iterable[str]) -> Pools:
    """Parse one pool a text: RANGE,...[@SELECTOR]; a range is FIRST-LAST, a CIDR or an address.

    Raises ValueError, also if two ranges overlap.
    """
    pools = tuple(map(_parse_pool, texts))
    ranges = [each for pool in pools for each in pool.ranges]
    ranges.sort(key=lambda it: (it.first.version, int(it.first)))
    for one, next_one in pairwise(ranges):
        if one.has(next_one.first):
            raise ValueError(f"{one} and {next_one} overlap")
    return pools


def show_pools(pools: Pools) -> list[str]:
    """The inverse of ``parse_pools``."""
    return list(map(str, pools))


def _parse_pool(text: str) -> Pool:
    ranges, at, selector = text.partition("@")
    if at and not selector.strip():
        raise ValueError(f"{quoted(text)}: no label follows the @")
    found = tuple(_parse_range(part.strip()) for part in ranges.split(","))
    return Pool(found, services.parse_requirements(selector))


def _parse_range(text: str) -> Range:
    first, dash, last = text.partition("-")
    if "/" in text:
        first, dash, last = _hosts(addresses.parse_network(text))
    found = Range(
        addresses.parse_frontend(first.strip()),
        addresses.parse_frontend((last if dash else first).strip()),
    )
    if found.first.version != found.last.version or int(found.first) > int(found.last):
        raise ValueError(f"{quoted(text)} is not FIRST-LAST such as 192.0.2.200-192.0.2.250")
    if is_probed(found.last) or found.has(PROBED[0]):
        raise ValueError(f"{quoted(text)} has addresses of {PROBED}, by which nodes are probed")
    return found


def _hosts(network: Network) -> tuple[str, str, str]:
    """Return the addresses that a host may have: not the network's own, nor its broadcast."""
    has_own = network.max_prefixlen - network.prefixlen > 1
    last = network[-1 - (has_own and network.version == 4)]
    return str(network[int(has_own)]), "-", str(last)


# What a Service asks for.


class Claim(NamedTuple):
    """What a Service asks for, and ``held``: the first addresses of its status, None if no VIP.

    ``uid`` and ``version`` (resourceVersion) are "" in an agent's own copy. ``wanted``: addresses
    that it names itself, one of a family; ``sharing``: Services with the same text may have one
    address. ``invalid``: why what it asks for cannot be read.
    """

    key: Key
    created: str
    uid: str
    version: str
    families: tuple[Family, ...]
    wanted: tuple[Address, ...]
    sharing: str
    ports: frozenset[tuple[str, int]]
    is_local: bool
    held: tuple[Address | None, ...]
    invalid: str = ""


_MOST_HELD = len(Family) + 1  # more than any Service gets: enough to see that it has too many
_LONGEST_KEY = 256  # characters


def read_claim(service: objects.Service, uid: str = "", version: str = "") -> Claim | None:
    """Return what a Service of our class asks for; None for any other Service."""
    meta, spec = service.metadata, service.spec
    if spec.type != BALANCER or spec.load_balancer_class != CLASS:
        return None
    invalid, wanted = "", tuple[Address, ...]()
    try:
        wanted = _wanted(service)
    except ValueError as error:
        invalid = str(error)
    return Claim(
        Key(meta.namespace, meta.name),
        meta.creation_timestamp or "",
        uid,
        version,
        _families(spec),
        wanted,
        _annotation(meta, objects.SHARING)[1][:_LONGEST_KEY],
        frozenset((it.protocol, it.port) for it in (spec.ports or ())[: services.MOST_PORTS]),
        spec.external_traffic_policy == "Local",
        held_by(service)[:_MOST_HELD],
        invalid,
    )


def held_by(service: objects.Service) -> tuple[Address | None, ...]:
    """Return the first addresses of the Service's status; None for a hostname, or no address."""
    status = service.status and service.status.load_balancer
    listed = (status and status.ingress) or ()
    return tuple(vip(each) for each in listed[: services.MOST_ADDRESSES])


def vip(ingress: objects.LoadBalancerIngress) -> Address | None:
    """Return the address of an entry of the status at which packets come in untranslated."""
    try:
        is_vip = ingress.ip_mode in (None, "VIP")
        return addresses.parse_address(ingress.ip or "") if is_vip else None
    except ValueError:
        return None


def _families(spec: objects.ServiceSpec) -> tuple[Family, ...]:
    listed = spec.ip_families or ["IPv6" if ":" in spec.cluster_ip else "IPv4"]
    known = (FAMILIES[it] for it in listed[: len(Family)] if it in FAMILIES)
    return tuple(dict.fromkeys(known))


def _annotation(meta: objects.Annotated, names: tuple[str, ...]) -> tuple[str, str]:
    """Return the field and the text of the first of these annotations that is set."""
    found = ((annotation_field(name), meta.annotation(name) or "") for name in names)
    return next((it for it in found if it[1]), ("", ""))


def _wanted(service: objects.Service) -> tuple[Address, ...]:
    """Return the addresses that the Service names. Raises ValueError."""
    field, text = _annotation(service.metadata, objects.REQUESTED)
    if not text:
        field, text = "spec.loadBalancerIP", service.spec.load_balancer_ip or ""
    parts = text.split(",", len(Family)) if text.strip() else []
    try:
        found = tuple(addresses.parse_frontend(part.strip()) for part in parts[: len(Family)])
        if len({it.version for it in found}) < len(parts):
            raise ValueError(f"{quoted(text)} has two addresses of one family")
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None
    return found


# Who gets what.


class Unusable(NamedTuple):
    """Addresses that no Service may have, with why: of nodes, routers, pods, other Services."""

    addresses: Mapping[Address, str] = {}
    networks: Mapping[Network, str] = {}

    def network_of(self, address: Address) -> Network | None:
        return next((it for it in self.networks if address in it), None)

    def reason(self, address: Address) -> str:
        """Return why the address may not be given away; "" if it may."""
        network = self.network_of(address)
        return self.addresses.get(address) or (self.networks[network] if network else "")


class Allotted(NamedTuple):
    """The addresses for a claim, and why it lacks one that it asks for, or has lost one."""

    claim: Claim
    addresses: tuple[Address, ...]
    problem: str

    @property
    def is_written(self) -> bool:
        return self.addresses == self.claim.held


Labels = Callable[[str], dict[str, str]]  # of a namespace


def allot(
    claims: Iterable[Claim], pools: Pools, unusable: Unusable, labels: Labels
) -> list[Allotted]:
    """Return the addresses of each claim, the oldest first."""
    order = sorted(claims, key=lambda it: (it.created or "~", it.uid, it.key))
    allotment = _Allotment(pools, unusable, labels)
    for claim in order:
        allotment.keep(claim)
    return [allotment.complete(claim) for claim in order]


class _User(NamedTuple):
    """The Services that have an address: one, or several that share it."""

    first: Claim
    ports: set[tuple[str, int]]


_ALL_GIVEN = f"all Services together have {MOST_ANSWERED:,} addresses already"


class _Allotment:
    def __init__(self, pools: Pools, unusable: Unusable, labels: Labels) -> None:
        self._pools, self._unusable, self._labels = pools, unusable, labels
        self._users: dict[Address, _User] = {}
        self._kept: dict[Key, dict[Family, Address]] = {}
        self._lost: dict[Key, str] = {}
        self._shared: dict[tuple[str, str, Family], Address] = {}  # the last that was given
        self._admitting: dict[str, list[Pool]] = {}  # by namespace
        self._free: dict[tuple[Pool, Family], Iterator[Address]] = {}

    def keep(self, claim: Claim) -> None:
        """Let a Service keep the addresses that it has, if it may."""
        kept = self._kept.setdefault(claim.key, {})
        for address in claim.held:
            if address is None or (family := addresses.family(address)) in kept:
                continue
            reason = f"it has no {family}" if family not in claim.families else ""
            reason = reason or self._refusal(claim, address)
            if reason:
                self._lost[claim.key] = f"{address} is taken away: {reason}"
            else:
                self._give(claim, address)
                kept[family] = address

    def complete(self, claim: Claim) -> Allotted:
        """Give a Service what it lacks, or another address that it asks for."""
        kept, problems = self._kept[claim.key], [claim.invalid]
        for family in claim.families:
            wanted = next((it for it in claim.wanted if it.version == family), None)
            if wanted and wanted != kept.get(family):
                if reason := self._refusal(claim, wanted):
                    problems.append(f"{wanted} is not given to it: {reason}")
                else:
                    kept[family] = wanted
                    self._give(claim, wanted)
            elif family not in kept and not (wanted or claim.invalid):
                if free := self._find(claim, family):
                    kept[family] = free
                    self._give(claim, free)
                elif self._has(claim, family) or (family == claim.families[-1] and not kept):
                    none = f"no pool of its namespace has a free {family} address"
                    problems.append(_ALL_GIVEN if self._is_full else none)
        found = tuple(kept[family] for family in claim.families if family in kept)
        said = [*filter(None, problems)] or [self._lost.get(claim.key, "")]
        return Allotted(claim, found, "; ".join(said))

    def _refusal(self, claim: Claim, address: Address) -> str:
        """Return why the Service may not have the address; "" if it may."""
        pool = next((it for it in self._pools if it.has(address)), None)
        if pool is None:
            return "it is in no pool"
        if pool not in self._pools_of(claim):
            return "its pool is not for this namespace"
        if self._is_full and address not in self._users:
            return _ALL_GIVEN
        return self._unusable.reason(address) or self._not_shared(claim, address)

    def _not_shared(self, claim: Claim, address: Address) -> str:
        user = self._users.get(address)
        if user is None:
            return ""
        if user.first.key.namespace != claim.key.namespace:
            return "a Service of another namespace has it"  # whose name is none of this one's
        who = f"Service {user.first.key} has it"
        if not claim.sharing or user.first.sharing != claim.sharing:
            return who
        if claim.is_local or user.first.is_local:
            return f"{who}; Services with externalTrafficPolicy Local share no address"
        return "" if user.ports.isdisjoint(claim.ports) else f"{who}, with the same port"

    def _give(self, claim: Claim, address: Address) -> None:
        self._users.setdefault(address, _User(claim, set())).ports.update(claim.ports)
        if claim.sharing:
            family = addresses.family(address)
            self._shared[claim.key.namespace, claim.sharing, family] = address

    def _pools_of(self, claim: Claim) -> list[Pool]:
        namespace = claim.key.namespace
        if namespace not in self._admitting:
            named = any(pool.selector for pool in self._pools)
            labels = self._labels(namespace) if named else {}
            self._admitting[namespace] = [it for it in self._pools if it.admits(labels)]
        return self._admitting[namespace]

    @property
    def _is_full(self) -> bool:
        return len(self._users) >= MOST_ANSWERED

    def _has(self, claim: Claim, family: Family) -> bool:
        pools = self._pools_of(claim)
        return any(it.first.version == family for pool in pools for it in pool.ranges)

    def _find(self, claim: Claim, family: Family) -> Address | None:
        shared = self._shared.get((claim.key.namespace, claim.sharing, family))
        if shared and not self._refusal(claim, shared):
            return shared
        if self._is_full:
            return None
        for pool in sorted(self._pools_of(claim), key=lambda it: not it.selector):
            free = self._free.setdefault((pool, family), self._unused(pool, family))
            if found := next(free, None):
                return found
        return None

    def _unused(self, pool: Pool, family: Family) -> Iterator[Address]:
        """Yield the free addresses; each is given away before the next one is asked for."""
        for first, last in (it for it in pool.ranges if it.first.version == family):
            at, end = int(first), int(last)
            while at <= end:
                address = type(first)(at)
                if network := self._unusable.network_of(address):
                    at = int(network[-1])
                elif address not in self._users and address not in self._unusable.addresses:
                    yield address
                at += 1


def given_back(ports: Ports, pools: Pools, service: object) -> Ports:
    """Return the service ports of a Service's last valid version, without what it gave back.

    ``service``: as it is now. So nobody keeps an address of the pools by an invalid Service.
    """
    kept = {*held_by(service)} if isinstance(service, objects.Service) else set()
    return tuple(
        replace(
            port,
            load_balancer_ips=tuple(
                it for it in port.load_balancer_ips if it in kept or not is_pooled(pools, it)
            ),
        )
        for port in ports
    )


def is_pooled(pools: Pools, address: Address) -> bool:
    return any(pool.has(address) for pool in pools)


# Who writes, and who answers.


def ranked(name: str, nodes: Collection[str]) -> list[str]:
    """Return the nodes by rendezvous hashing for a name: the first is its owner.

    When a node goes, only its names move: to the next in their order (Thaler, Ravishankar 1998).
    """
    begun = blake2b(f"{name}\0".encode(), digest_size=8)

    def weight(node: str) -> bytes:
        made = begun.copy()
        made.update(node.encode())
        return made.digest()

    return sorted(nodes, key=lambda node: (weight(node), node), reverse=True)


def announced(
    claims: Iterable[Claim], pools: Pools, unusable: Unusable
) -> dict[Address, list[Claim]]:
    """Return the addresses that the cluster's nodes answer for, with the Services that have them.

    At most MOST_ANSWERED, those of the oldest Services.
    """
    found: dict[Address, list[Claim]] = {}
    for claim in sorted(claims, key=lambda it: (it.created or "~", it.key)):
        for address in claim.held:
            if address is None or not is_pooled(pools, address) or unusable.reason(address):
                continue
            if address in found or len(found) < MOST_ANSWERED:
                found.setdefault(address, []).append(claim)
    return found


def preferred(local: Iterable[Collection[str]]) -> frozenset[str]:
    """Return the nodes that should own an address, given the nodes with endpoints of its Services.

    With policy Local only such a node serves. Empty: any node may.
    """
    each = [frozenset(nodes) for nodes in local if nodes]
    return frozenset.intersection(*each) or each[0] if each else frozenset()


def is_probed(address: Address) -> bool:
    return address in PROBED


AGENT, PROGRAM = "agent", "program"  # what a probe asks for, on a node


def probed_address(cluster: str, node: str, what: str) -> Address:
    """Return the address by which agents of the same cluster ask whether a node lives."""
    digest = blake2b(f"{cluster}\0{node}\0{what}".encode(), digest_size=4).digest()
    return PROBED[int.from_bytes(digest, "big") % (PROBED.num_addresses - 1)]


def answered_by(address: str, owner: str, living: Collection[str]) -> str:
    """Return a sentence; ``owner``: a node, or the MAC address of a stranger."""
    nodes = f"{len(living)} living node{'s' * (len(living) != 1)}"
    return f"{address} is answered for by {owner}{f' (owner of {nodes})' * (owner in living)}"
