# SPDX-License-Identifier: Apache-2.0
"""Compare the firewall rules of this network namespace with the Services that ebpflb serves.

Two questions: which rules name a Service's address or NodePort and may not match requests to the
Service, and which rules act on each packet of a connection (docs/firewalls.md).
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.netfilter.each_packet import each_packet
from ebpflb.kernel.netfilter.firewall_reader import tables
from ebpflb.kernel.netfilter.firewall_rules import NAT_DST, Chain, Rule, Table
from ebpflb.model.addresses import host_port, number
from ebpflb.model.annotations import NODE_LOCAL_ANNOTATION
from ebpflb.model.services import Protocol
from ebpflb.plan.entries import NODE_PORT, Flags, frontend_kind
from ebpflb.tools import pins
from ebpflb.tools.snapshot import Snapshot

MOST_SHOWN = 20
_EARLY = ("prerouting", "output")  # where NAT of the destination happens
_HOOKS = ("ingress", *_EARLY, "input", "forward", "postrouting")
_OURS = -110  # priority of the netfilter engine's own chain of type nat in PREROUTING


class FirewallSurvey(Struct):
    """The findings.

    ``named``: rules that may not match requests to Services; None if no agent has run, because the
    Services are unknown then. ``unread``: what could not be compared, and why.
    """

    named: list[str] | None
    each_packet: list[str]
    unread: list[str]


def survey(state_directory: Path) -> FirewallSurvey:
    """Read all rules and compare them. Raises NodeError."""
    unread = list[str]()
    found = list(tables(unread))
    with pins.maps_if_any(state_directory) as maps:
        named = None if maps is None else _named(found, Search(frontends(maps)), unread)
    lines = dict.fromkeys(line for table in found for line in each_packet(table))
    return FirewallSurvey(named, list(lines), unread)


def _named(found: list[Table], search: "Search", unread: list[str]) -> list[str]:
    lines = list(dict.fromkeys(line for table in found for line in search.named(table)))
    if search.unread:
        unread.append(f"{search.unread} rules cannot be read in full: not compared")
    if len(lines) > MOST_SHOWN:
        unread.append(f"{len(lines) - MOST_SHOWN} more rules like these")
    return lines[:MOST_SHOWN]


class Frontend(NamedTuple):
    """A frontend with an endpoint; ``title`` names the frontend and its Service.

    ``addresses`` are those of the node for a NodePort. ``is_early``: requests have the endpoint's
    address in PREROUTING, from sockets or by the flow tables. ``has_listener``: sockets' requests
    go to a listener on this node instead.
    """

    protocol: int
    addresses: tuple[int, ...]
    port: int
    title: str
    endpoint: tuple[int, int]
    is_nodeport: bool
    is_early: bool
    has_listener: bool = False


def frontends(maps: Mapping[str, Map]) -> Iterator[Frontend]:
    """Yield the frontends that have endpoints; others are not translated."""
    snapshot, flags = Snapshot(maps), maps["settings"].get(0).flags
    node = [address for address, _ in maps["node_addresses"].items()]
    node = [address for address in node if not (address.is_loopback or address.is_link_local)]
    endpoints = {it.service: (number(it.address), it.port) for it in snapshot.slots.values()}
    for key, service in snapshot.services.items():
        if service.id not in endpoints or not key.port:
            continue
        kind, version = frontend_kind(key, service.flags), key.address.version
        if kind == NODE_PORT:
            addresses, where = [it for it in node if it.version == version], f"NodePort {key.port}"
        else:
            addresses, where = [key.address], host_port(key.address, key.port)
        yield Frontend(
            key.protocol,
            tuple(map(number, addresses)),
            key.port,
            f"{where} ({snapshot.service(service.id)})",
            endpoints[service.id],
            kind == NODE_PORT,
            is_early(kind, key.protocol, service.flags, flags),
            "node_local" in service.flags,
        )


def is_early(kind: str, protocol: int, service: Flags, settings: Flags) -> bool:
    """Whether requests have the endpoint's address in PREROUTING.

    Clients outside use all frontends except cluster IPs, which pods use, by their sockets.
    """
    if kind == "ClusterIP" and protocol != Protocol.SCTP and "host_sockets" not in settings:
        return True
    is_sctp_by_flows = protocol == Protocol.SCTP and "netfilter_sctp" not in settings
    return "netfilter" not in settings or "least_connections" in service or is_sctp_by_flows


class Search:
    """The search for rules that name a frontend, and may not match requests to it.

    They look at the destination where kube-proxy has not translated it yet, and ebpflb has: at
    sockets, and with the flow tables. A rule is read by itself: its other conditions (source,
    device, state) are assumed to hold, and rules before it are not considered. ``unread`` is the
    number of rules that cannot be read in full.
    """

    def __init__(self, served: Iterable[Frontend]) -> None:
        self._frontends = list(served)
        places = list(enumerate(self._frontends))
        self._by_address = sorted((it, at) for at, each in places for it in each.addresses)
        self._by_port = sorted((each.port, at) for at, each in places if each.is_nodeport)
        self.unread = 0

    def named(self, table: Table) -> Iterator[str]:
        """Yield a line for each such rule of this table."""
        for base in table.chains.values():
            for name, rule in table.reached_from(base) if base.hook in _HOOKS else ():
                if not (rule.asks_for_original or _is_before_nat(base)):
                    continue
                try:
                    frontend = self._find(rule, base)
                except ValueError:
                    self.unread += 1
                    continue
                if frontend:
                    hook = "" if name.lower() == base.hook else f" ({base.hook})"
                    where = f"{table.title}, chain {name}{hook}: {rule.text}"
                    yield f"{where}: {_effect_on(rule, frontend)}"

    def _find(self, rule: Rule, base: Chain) -> Frontend | None:
        """Return the first such frontend, if any. Raises ValueError for an unreadable rule."""
        for frontend in self._candidates(rule):
            protocol, port = frontend.protocol, frontend.port
            if (
                _is_translated(frontend, base)
                and not (rule.exempts and frontend.has_listener)
                and any(rule.matches(protocol, address, port) for address in frontend.addresses)
                and not rule.matches(protocol, *frontend.endpoint)
            ):
                return frontend
        return None

    def _candidates(self, rule: Rule) -> Iterator[Frontend]:
        """Yield the frontends that a rule names by address, or by port if it names no address."""
        asked = [condition for condition in rule.conditions if not condition.negated]
        for condition in sorted(asked, key=lambda it: not it.of_address)[:1]:
            index = self._by_address if condition.of_address else self._by_port
            for first, last in condition.ranges:
                begin, end = bisect_left(index, (first, 0)), bisect_left(index, (last + 1, 0))
                yield from (self._frontends[at] for _, at in index[begin:end])


def _effect_on(rule: Rule, frontend: Frontend) -> str:
    """Return what a rule misses, and for an exemption what leads sockets to the listener."""
    if not rule.exempts:
        return f"may not match requests to {frontend.title}"
    return (
        f"does not exempt sockets' requests to {frontend.title}: they get endpoints, unless the"
        f" Service has {NODE_LOCAL_ANNOTATION}, and its listener answers (docs/node-local.md)"
    )


def _is_before_nat(base: Chain) -> bool:
    """Whether kube-proxy translates only after this hook."""
    is_early = base.hook in _EARLY and (base.priority < NAT_DST or base.is_nat)
    return base.hook == "ingress" or is_early


def _is_translated(frontend: Frontend, base: Chain) -> bool:
    """Whether requests have the endpoint's address at this hook, and for conntrack.

    A chain of type nat behind the netfilter engine's own is not asked.
    """
    if base.hook == "output":
        return frontend.protocol != Protocol.SCTP
    is_behind_ours = base.is_nat and base.hook == "prerouting" and base.priority > _OURS
    return frontend.is_early or is_behind_ours
