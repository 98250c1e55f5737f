# SPDX-License-Identifier: Apache-2.0
"""Which rules name a Service's address or port, and do not match requests to it with ebpflb.

They are rules that look at the destination where kube-proxy has not translated it yet, and ebpflb
has: at sockets, and with the flow tables (docs/firewalls.md, which names what to use
instead). A rule is read by itself: its other conditions (source, device, state) are assumed to
hold, and rules before it are not considered.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import NamedTuple

from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.node import device_watch
from ebpflb.model.addresses import Address, host_port
from ebpflb.model.packet_path import Engine
from ebpflb.model.services import Protocol
from ebpflb.plan.entries import (
    LOOPBACK,
    NODE_PORT,
    frontend_kind,
)
from ebpflb.tools import pins
from ebpflb.tools.firewall.rules import NAT_DST, Chain, Rule, Table, number
from ebpflb.tools.snapshot import Snapshot

CLUSTER_IP, LOAD_BALANCER = "ClusterIP", "LoadBalancer"
_NODEPORTS = range(30000, 32768)  # the API server's default --service-node-port-range
_MOST_ADDRESSES = 16  # of the node, at which NodePorts are compared
_MOST_ENDPOINTS = 8  # of a Service, that are compared
_EARLY = ("ingress", "prerouting", "output")  # where NAT of the destination happens, or later
_HOOKS = (*_EARLY, "input", "forward", "postrouting")
_OURS = -110  # priority of our table of the netfilter engine in PREROUTING


class Settings(NamedTuple):
    """The settings in force on the node."""

    engine: Engine
    host_sockets: bool = False  # --socket-translation=host


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
    """All frontends, those for clients outside first, indexed by address and NodePort."""

    def __init__(self, found: Iterable[Frontend]) -> None:
        self.all = sorted(found, key=lambda it: (_ORDER.index(it.kind), it.family, it.port))
        places = list(enumerate(self.all))
        self._by_address = sorted((it, at) for at, each in places for it in each.addresses)
        self._by_port = sorted((each.port, at) for at, each in places if each.kind == NODE_PORT)

    def candidates(self, rule: Rule) -> Iterator[Frontend]:
        """Yield the frontends that a rule names by address, or by port if it names no address."""
        asked = [condition for condition in rule.conditions if not condition.negated]
        for condition in sorted(asked, key=lambda it: not it.of_address)[:1]:
            index = self._by_address if condition.of_address else self._by_port
            for first, last in condition.ranges.pairs:
                begin, end = bisect_left(index, (first, 0)), bisect_left(index, (last + 1, 0))
                yield from (self.all[at] for _, at in index[begin:end])


_ORDER = (NODE_PORT, LOAD_BALANCER, "ExternalIP", CLUSTER_IP, LOOPBACK)


def in_force(state_directory: Path, engine: Engine) -> tuple[Settings, list[Frontend], bool]:
    """Return settings and frontends from the maps; the last value is False without maps.

    Without maps ``engine`` is the expected one. Raises NodeError.
    """
    with pins.maps_if_any(state_directory) as maps:
        if maps is None:
            return Settings(engine), list(_expected(device_watch.list_devices().addresses)), False
        flags = maps["settings"].get(0).flags
        engine = Engine.NETFILTER if "netfilter" in flags else Engine.FLOWS
        frontends = list(_programmed(maps, sctp="netfilter_sctp" in flags))
        return Settings(engine, "host_sockets" in flags), frontends, True


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
                frontend_kind(frontend, service.flags),
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


class Named(NamedTuple):
    """A rule that names a frontend, and may not match its requests."""

    where: str  # its table, chain and hook
    rule: str
    frontend: str

    def __str__(self) -> str:
        return f"{self.where}: {self.rule}: may not match requests to {self.frontend}"


class Search:
    """The search for such rules; ``unread``: the number of rules that cannot be read in full."""

    def __init__(self, frontends: Frontends, settings: Settings) -> None:
        self._frontends, self._settings = frontends, settings
        self.unread = 0

    def named(self, table: Table) -> Iterator[Named]:
        """Yield such rules of this table."""
        for base in table.chains.values():
            for name, rule in table.reached_from(base) if base.hook in _HOOKS else ():
                try:
                    frontend = self._find(rule, base, table.family)
                except ValueError:
                    self.unread += 1
                    continue
                if frontend:
                    hook = "" if name.lower() == base.hook else f" ({base.hook})"
                    yield Named(f"{table.title}, chain {name}{hook}", rule.text, frontend.title)

    def _find(self, rule: Rule, base: Chain, family: int) -> Frontend | None:
        """Return the first such frontend, if any. Raises ValueError for an unreadable rule."""
        if not (rule.asks_for_original or _is_early(base)):
            return None
        for frontend in self._frontends.candidates(rule):
            if (
                family in (0, frontend.family)
                and self._is_translated(base, frontend)
                and _names(rule, frontend)
            ):
                return frontend
        return None

    def _is_translated(self, base: Chain, frontend: Frontend) -> bool:
        """Whether requests have the endpoint's address at this hook, and for conntrack.

        Clients outside use all frontends except cluster IPs, which pods use.
        """
        by_sockets = frontend.protocol != Protocol.SCTP
        if base.hook == "output":
            return by_sockets
        if frontend.kind == CLUSTER_IP and by_sockets and not self._settings.host_sockets:
            return True
        by_flows = self._settings.engine is Engine.FLOWS or frontend.by_flows
        return by_flows or _is_behind_ours(base)


def _is_early(base: Chain) -> bool:
    """Whether kube-proxy translates only after this hook."""
    nat_comes = base.priority < NAT_DST or base.is_nat
    return base.hook == "ingress" or (base.hook in _EARLY and nat_comes)


def _is_behind_ours(base: Chain) -> bool:
    """Whether it is a nat chain that is not asked, as the engine's own has translated."""
    return base.is_nat and base.hook == "prerouting" and base.priority > _OURS


def _names(rule: Rule, frontend: Frontend) -> bool:
    """Whether the rule matches the frontend, and some endpoint not."""
    return any(
        rule.matches(frontend.protocol, address, frontend.port)
        and not rule.matches(frontend.protocol, *endpoint)
        for address, endpoint in product(frontend.addresses, frontend.endpoints)
    )
