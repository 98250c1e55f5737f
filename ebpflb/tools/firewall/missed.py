# SPDX-License-Identifier: Apache-2.0
"""Which rules name a Service and may not match requests to it, or may drop them, with ebpflb.

A rule is read by itself: its other conditions (source, device, state) are assumed to hold, and
rules before it are not considered. It is tried with the destination that a request has at its hook
with kube-proxy, and with the endpoint, which it has if ebpflb has already translated it: at
sockets, and with the flow tables (docs/firewalls.md).
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, product
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from ebpflb.errors import NodeError
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.node import device_watch
from ebpflb.model.addresses import Address
from ebpflb.model.packet_path import Engine
from ebpflb.model.services import Protocol
from ebpflb.plan.entries import NODE_PORT, host_port
from ebpflb.tools.firewall.rules import (
    KUBE_MARK,
    NAT_DST,
    Chain,
    Option,
    Ranges,
    Rule,
    Table,
    addresses,
    mark_and_mask,
    number,
    ports,
)
from ebpflb.tools.snapshot import Snapshot, kind

# The Services that firewall rules may name, and the node's settings that matter to them.

CLUSTER_IP, LOAD_BALANCER = "ClusterIP", "LoadBalancer"
_NODEPORTS = range(30000, 32768)  # the API server's default --service-node-port-range
_MOST_ADDRESSES = 16  # of the node, at which NodePorts are compared
_MOST_ENDPOINTS = 8  # of a Service, that are compared


class Settings(NamedTuple):
    """The settings in force on the node; ``own`` are its addresses."""

    engine: Engine
    own: frozenset[int] = frozenset()
    host_sockets: bool = False  # --socket-translation=host
    packet_mark: bool = False  # --packet-mark is set


class Frontend(NamedTuple):
    """A frontend with its endpoints; ``title`` names it and its Service.

    ``endpoints`` are addresses and ports. ``by_flows``: the flow tables serve it with either
    engine.
    """

    kind: str
    protocol: int
    family: int
    addresses: tuple[int, ...]
    port: int
    title: str
    endpoints: tuple[tuple[int, int], ...]
    by_flows: bool = False


class Frontends:
    """All frontends, those for clients outside first, also indexed by address and by port.

    The indexes contain their own addresses and ports, and those of their endpoints.
    """

    def __init__(self, found: Iterable[Frontend]) -> None:
        self.all = sorted(found, key=lambda it: (_ORDER.index(it.kind), it.family, it.port))
        self.by_address = _Index(
            (address, it) for it in self.all for address in (*it.addresses, *dict(it.endpoints))
        )
        self.by_port = _Index(
            (port, it) for it in self.all for port in (it.port, *dict(it.endpoints).values())
        )


_ORDER = (NODE_PORT, LOAD_BALANCER, "ExternalIP", CLUSTER_IP)


class _Index:
    def __init__(self, entries: Iterable[tuple[int, Frontend]]) -> None:
        self._entries = sorted(entries, key=itemgetter(0))
        self._numbers = [entry[0] for entry in self._entries]

    def within(self, ranges: Ranges) -> Iterator[Frontend]:
        """Yield the frontends with a number in the ranges."""
        for first, last in ranges.pairs:
            begin, end = bisect_left(self._numbers, first), bisect_right(self._numbers, last)
            yield from (frontend for _, frontend in self._entries[begin:end])


def in_force(state_directory: Path, engine: Engine) -> tuple[Settings, list[Frontend], bool]:
    """Return settings and frontends from the maps; the last value is False without maps.

    Without maps ``engine`` is the expected one. Raises NodeError.
    """
    addresses = device_watch.list_devices().addresses
    own = frozenset(map(number, addresses))
    try:
        maps = StateDir(state_directory).read_maps()
    except NodeError:
        return Settings(engine, own), list(_expected(addresses)), False
    try:
        settings = maps["settings"].get(0)
        flags = settings.flags
        found = Settings(
            Engine.NETFILTER if "netfilter" in flags else Engine.FLOWS,
            own,
            "host_sockets" in flags,
            bool(settings.mark_mask),
        )
        return found, list(_programmed(maps, sctp="netfilter_sctp" in flags)), True
    finally:
        for opened in maps.values():
            opened.close()


def _programmed(maps: Mapping[str, Map], *, sctp: bool) -> Iterator[Frontend]:
    """Yield the frontends in the maps that have endpoints; others are not translated.

    ``sctp``: whether the kernel's NAT can translate SCTP.
    """
    snapshot = Snapshot.read(maps)
    serving = _of_node(address for address, _ in maps["node_addresses"].items())
    endpoints: dict[int, list[tuple[int, int]]] = {}
    for backend in snapshot.slots.values():
        endpoint = number(backend.address), backend.port
        endpoints.setdefault(backend.service, []).append(endpoint)
    for frontend, service in snapshot.services.items():
        address, port = frontend.address, frontend.port
        if service.id in endpoints:
            where = f"NodePort {port}" if address.is_unspecified else host_port(address, port)
            yield Frontend(
                kind(frontend, service),
                frontend.protocol,
                address.version,
                serving[address.version] if address.is_unspecified else (number(address),),
                port,
                f"{where} ({snapshot.service(service.id)})",
                tuple(dict.fromkeys(endpoints[service.id]))[:_MOST_ENDPOINTS],
                "least_connections" in service.flags
                or (frontend.protocol == Protocol.SCTP and not sctp),
            )


def _expected(addresses: Iterable[Address]) -> Iterator[Frontend]:
    """Yield every NodePort that a Service may get, without an endpoint, if no map exists yet."""
    serving = _of_node(addresses)
    for port, protocol, family in product(_NODEPORTS, (Protocol.TCP, Protocol.UDP), (4, 6)):
        title = f"NodePort {port}"
        yield Frontend(NODE_PORT, protocol, family, serving[family], port, title, ((-1, -1),))


def _of_node(addresses: Iterable[Address]) -> dict[int, tuple[int, ...]]:
    """Return the addresses at which clients outside reach a NodePort, by family."""
    found = [it for it in addresses if not (it.is_loopback or it.is_link_local)]
    return {
        family: tuple(sorted(number(it) for it in found if it.version == family))[:_MOST_ADDRESSES]
        for family in (4, 6)
    }


_EARLY = ("ingress", "prerouting", "output")  # where NAT of the destination happens, or later
_HOOKS = (*_EARLY, "input", "forward", "postrouting")
_HOOKS_OF_PODS = ("output", "postrouting")
_MOST_STEPS = 1_000_000
_TRANSLATED_AT = -110  # priority of our table of the netfilter engine in PREROUTING
_DROPS, _MARKS = {"DROP", "REJECT"}, {"MARK", "CONNMARK"}
_REDIRECTS = {"REDIRECT", "DNAT", "TPROXY"}
_ADDRESSES, _PORTS = (
    {"-d", "--dst-range", "--ctorigdst"},
    {"--dport", "--dports", "--ctorigdstport"},
)
_HOST_SOCKETS, _NETFILTER = "--socket-translation=host", "--packet-path=netfilter"
_ENDPOINT = "match the endpoint's address and port"
_BY_SOURCE = {
    NODE_PORT: "--nodeport-source-ranges or ",
    LOAD_BALANCER: "loadBalancerSourceRanges or ",
}
# For nodes where routing rules by mark choose the uplink of pods' replies (AWS VPC CNI).
BY_CLIENT = (
    "--reply-path=request-device, or lead replies by clients instead of the mark: ip rule add"
    " iif <pod's device> to <clients> lookup main, with a priority before the pods' own rules"
)


class Missed(NamedTuple):
    """A rule, its effect on requests to which Service, and the remedy."""

    where: str  # its table, chain and hook
    rule: str
    says: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.where}: {self.rule}: {self.says}"


class _Place(NamedTuple):
    """A hook.

    ``early``: NAT of the destination comes later. ``unasked``: a chain of type nat in PREROUTING
    after our own, which has already translated.
    """

    hook: str
    early: bool
    in_pod: bool
    unasked: bool

    @property
    def of_sockets(self) -> bool:
        """Whether traffic there comes from sockets of its own namespace."""
        return self.in_pod or self.hook == "output"


class _Seen(NamedTuple):
    """A request as a rule sees it: its current destination, and the original one in conntrack."""

    protocol: int
    address: int
    port: int
    original: tuple[int, int]
    is_translated: bool  # by NAT, with kube-proxy: "ct status dnat" and its mark
    is_local: bool


class Search:
    """The search for such rules.

    ``skipped``: the number of unreadable rules; ``steps``: comparisons of a rule with a Service
    that are still allowed.
    """

    def __init__(self, frontends: Frontends, settings: Settings, steps: int = _MOST_STEPS) -> None:
        self._frontends, self._settings = frontends, settings
        self._judged: dict[object, tuple[str, str] | None] = {}
        self.skipped, self.steps = 0, steps

    def missed(self, table: Table, *, in_pod: bool = False) -> Iterator[Missed]:
        """Yield the rules of this table to report."""
        for base in table.chains.values():
            if base.hook not in (_HOOKS_OF_PODS if in_pod else _HOOKS):
                continue
            place = _place(base, in_pod)
            for name, rule in table.reached_from(base):
                hook = "" if name.lower() == base.hook else f" ({base.hook})"
                if found := self._find(rule, place, table.family):
                    yield Missed(f"{table.title}, chain {name}{hook}", rule.text, *found)

    def _find(self, rule: Rule, place: _Place, family: int) -> tuple[str, str] | None:
        """Judge a rule, once for equal rules: rules in pods often are equal."""
        key = rule.options, place, family
        try:
            if key not in self._judged:
                self._judged[key] = self._judge(rule, place, family)
        except ValueError:
            self.skipped += 1
        return self._judged.get(key)

    def _judge(self, rule: Rule, place: _Place, family: int) -> tuple[str, str] | None:
        """Return the effect and the remedy. Raises ValueError for an unreadable rule."""
        if place.in_pod and rule.targets & _REDIRECTS and self._is_redirecting(rule):
            said = "may get the endpoint as the original destination of requests to Services"
            return None if self._settings.host_sockets else (said, _HOST_SOCKETS)
        if not _asks(rule):
            return None
        for frontend in islice(_candidates(rule, self._frontends), self.steps):
            self.steps -= 1
            if (
                family in (0, frontend.family)
                and self._is_bypassed(place, frontend)
                and _concerns(rule, place, frontend)
            ):
                for said in self._differences(rule, place, frontend):
                    ways = _remedy(rule, place, frontend, self._settings, said)
                    return f"{said} requests to {frontend.title}", ways
        return None

    def _is_redirecting(self, rule: Rule) -> bool:
        """Whether the rule concerns all destinations, or some Service."""
        return any(True for _ in _candidates(rule, self._frontends))

    def _is_bypassed(self, place: _Place, frontend: Frontend) -> bool:
        """Whether requests have the endpoint's address at this hook, but not with kube-proxy.

        Clients outside use all frontends except cluster IPs, which pods use.
        """
        settings = self._settings
        by_sockets = frontend.protocol != Protocol.SCTP
        if place.in_pod:
            return by_sockets and not settings.host_sockets
        if place.of_sockets:
            return by_sockets
        if frontend.kind == CLUSTER_IP and by_sockets and not settings.host_sockets:
            return True
        return settings.engine is Engine.FLOWS or frontend.by_flows or place.unasked

    def _differences(self, rule: Rule, place: _Place, frontend: Frontend) -> Iterator[str]:
        """Yield the effects on the rule, in words."""
        for address, endpoint in product(frontend.addresses, frontend.endpoints):
            to_service = self._seen(frontend, address, frontend.port)
            now = _holds(rule, self._seen(frontend, *endpoint))
            before = to_service if place.early else to_service._replace(is_translated=True)
            held = _holds(rule, before)
            if not (held or place.early or frontend.kind == CLUSTER_IP):
                held = _holds(rule, self._translated(frontend, address, endpoint))
            if held and not now and not self._is_marked_for(rule):
                yield "may not match"
            elif now and not held and self._may_drop(rule, place, frontend):
                yield "may drop"

    def _seen(self, frontend: Frontend, address: int, port: int) -> _Seen:
        is_local = address in self._settings.own
        return _Seen(frontend.protocol, address, port, (address, port), False, is_local)

    def _translated(self, frontend: Frontend, address: int, endpoint: tuple[int, int]) -> _Seen:
        seen = self._seen(frontend, *endpoint)
        return seen._replace(original=(address, frontend.port), is_translated=True)

    def _is_marked_for(self, rule: Rule) -> bool:
        """Whether the rule tests for NAT, and packets have --packet-mark instead."""
        return self._settings.packet_mark and any(map(_asks_for_nat, rule.options))

    def _may_drop(self, rule: Rule, place: _Place, frontend: Frontend) -> bool:
        """Whether the rule may drop requests.

        With --packet-mark, earlier rules should accept those.
        """
        is_asked = not place.of_sockets and frontend.kind != CLUSTER_IP
        return bool(rule.targets & _DROPS) and is_asked and not self._settings.packet_mark


def unjudged(table: Table) -> Iterator[str]:
    """Yield the chains with rules at hooks that are not compared."""
    for chain in table.chains.values():
        if chain.rules and chain.hook in ("bridge", "egress"):
            yield f"{table.title}, chain {chain.name}"


def _place(base: Chain, in_pod: bool) -> _Place:
    nat_comes = base.priority < NAT_DST or base.is_nat
    early = in_pod or base.hook == "ingress" or (base.hook in _EARLY and nat_comes)
    unasked = base.is_nat and base.hook == "prerouting" and base.priority > _TRANSLATED_AT
    return _Place(base.hook, early, in_pod, unasked)


def _asks(rule: Rule) -> bool:
    """Whether the rule names a destination, or tests for an effect of NAT.

    A test for the node's own addresses counts if the rule marks such packets, or drops others.
    """
    return any(
        (option.name in _ADDRESSES | _PORTS and not option.negated)
        or _asks_for_nat(option)
        or (option.name == "--dst-type" and rule.targets & (_DROPS if option.negated else _MARKS))
        for option in rule.options
    )


def _asks_for_nat(option: Option) -> bool:
    if option.name == "--mark":
        mark, mask = mark_and_mask(option.value)
        return KUBE_MARK in (mark, mask)
    return option.name == "--ctstate" and "DNAT" in option.value.split(",")


def _concerns(rule: Rule, place: _Place, frontend: Frontend) -> bool:
    """Whether the rule concerns this frontend.

    A rule for a port alone concerns NodePorts and, before NAT, external addresses; one for neither
    port nor address concerns traffic from outside.
    """
    names = {option.name for option in rule.options if not option.negated}
    if names & _ADDRESSES:
        return True
    outside = frontend.kind != CLUSTER_IP and not place.of_sockets
    if names & _PORTS:
        return frontend.kind == NODE_PORT or (outside and place.early)
    return outside


def _candidates(rule: Rule, frontends: Frontends) -> Iterable[Frontend]:
    """Return all frontends that a rule can concern, and maybe more."""
    asked = {option.name: option.value for option in rule.options if not option.negated}
    for name in _ADDRESSES & asked.keys():
        return frontends.by_address.within(addresses(asked[name]))
    for name in _PORTS & asked.keys():
        return frontends.by_port.within(ports(asked[name]))
    return frontends.all


def _holds(rule: Rule, seen: _Seen) -> bool:
    """Whether the options about the destination match. Raises ValueError."""
    return all(
        _READERS[option.name](option.value, seen) != option.negated
        for option in rule.options
        if option.name in _READERS
    )


def _is_protocol(value: str, seen: _Seen) -> bool:
    names = {"all", str(seen.protocol), Protocol(seen.protocol).name.lower()}
    return not names.isdisjoint(value.split(","))


def _is_local(value: str, seen: _Seen) -> bool:
    return ("local" if seen.is_local else "unicast") in value.lower().split(",")


def _has_state(value: str, seen: _Seen) -> bool:
    return "DNAT" not in value.split(",") or seen.is_translated


def _has_mark(value: str, seen: _Seen) -> bool:
    """Whether the mark matches; only kube-proxy's bits are known."""
    mark, mask = mark_and_mask(value)
    return KUBE_MARK not in (mark, mask) or bool(mark & KUBE_MARK) == seen.is_translated


_READERS: dict[str, Callable[[str, _Seen], bool]] = {
    "-d": lambda value, seen: seen.address in addresses(value),
    "--dst-range": lambda value, seen: seen.address in addresses(value),
    "--dport": lambda value, seen: seen.port in ports(value),
    "--dports": lambda value, seen: seen.port in ports(value),
    "-p": _is_protocol,
    "--dst-type": _is_local,
    "--ctorigdst": lambda value, seen: seen.original[0] in addresses(value),
    "--ctorigdstport": lambda value, seen: seen.original[1] in ports(value),
    "--ctstate": _has_state,
    "--mark": _has_mark,
}


def _remedy(rule: Rule, place: _Place, frontend: Frontend, settings: Settings, said: str) -> str:
    or_netfilter = "" if settings.engine is Engine.NETFILTER else f", or {_NETFILTER}"
    if place.in_pod:
        return f"{_ENDPOINT}, or {_HOST_SOCKETS}"
    if place.of_sockets:
        return f"{_ENDPOINT}: sockets are connected to it"
    if said == "may drop":
        return f"accept packets with the mark of --packet-mark before it{or_netfilter}"
    if frontend.kind == CLUSTER_IP and not settings.host_sockets:
        return f"{_ENDPOINT}, or {_HOST_SOCKETS}{or_netfilter.replace(', or', ' and')}"
    by_source = f"{_BY_SOURCE.get(frontend.kind, '')}NetworkPolicy, or {_ENDPOINT} in FORWARD"
    if place.early and rule.targets & _MARKS:
        return f"{BY_CLIENT}{or_netfilter}"
    if place.unasked or (place.early and rule.targets & _REDIRECTS):
        return (
            "give the rule an address or port that no service has, because services are "
            "handled first"
        )
    if place.early:
        return f"{by_source}{or_netfilter}"
    if any(_asks_for_nat(it) or it.name.startswith("--ctorig") for it in rule.options):
        return f"--packet-mark, and a rule that matches that mark{or_netfilter}"
    return f"it sees the endpoint, as with kube-proxy: {by_source}"
