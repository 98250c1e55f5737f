# SPDX-License-Identifier: Apache-2.0
"""Which firewall rules drop requests from clients outside to Services, or act on each packet of a
flow.

Only rules that drop every such request count, whatever the client, and only at PREROUTING and
ingress: FORWARD is for ``forwarding``.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from ebpflb.entries.services import NODE_PORT, Flags, frontend_kind
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.netfilter.each_packet import each_packet
from ebpflb.kernel.netfilter.firewall import Chain, Rule, Table, tables
from ebpflb.model.addresses import Address, host_port, number
from ebpflb.model.services import Protocol
from ebpflb.tools import pins
from ebpflb.tools.firewall.forwarding import way_of
from ebpflb.tools.firewall.walk import DROPPING, Fate, Packet, Way, fates
from ebpflb.tools.snapshot import Snapshot

MOST_SHOWN = 20
_MOST_TRIED = 64  # frontends that one rule names
_HOOKS = ("ingress", "prerouting")
_OURS = -110  # priority of the netfilter engine's own chain of type nat in PREROUTING
_OUTSIDE = (NODE_PORT, "LoadBalancer", "ExternalIP")


class FirewallSurvey(Struct):
    """The findings.

    ``dropping``: rules that drop requests to Services; None if no agent has run, because the
    Services are unknown then. ``unread``: the rules that could not be read, and why.
    """

    dropping: list[str] | None
    each_packet: list[str]
    unread: list[str]


def survey(state_directory: Path) -> FirewallSurvey:
    """Read all rules and compare them with the Services. Raises NodeError."""
    unread = list[str]()
    found = list(tables(unread))
    with pins.maps_if_any(state_directory) as maps:
        dropping = None
        if maps is not None:
            search = Search(frontends(maps), {version: way_of(version) for version in (4, 6)})
            named = (line for table in found for line in search.named(table))
            dropping = list(islice(dict.fromkeys(named), MOST_SHOWN))
            if search.unread:
                unread.append(f"{search.unread} rules that drop cannot be read in full")
    lines = dict.fromkeys(line for table in found for line in each_packet(table))
    return FirewallSurvey(dropping, list(lines), unread)


class Frontend(NamedTuple):
    """A frontend for clients outside that has an endpoint; ``title`` names it and its Service.

    ``is_early``: the flow tables give requests the endpoint's address before the first rule.
    """

    protocol: int
    address: Address
    port: int
    title: str
    endpoint: tuple[Address, int]
    is_early: bool

    def seen_at(self, base: Chain) -> tuple[Address, int]:
        """Return the destination that requests have at this chain."""
        is_behind_ours = base.hook == "prerouting" and base.priority > _OURS
        is_translated = self.is_early or is_behind_ours
        return self.endpoint if is_translated else (self.address, self.port)


def frontends(maps: Mapping[str, Map]) -> Iterator[Frontend]:
    """Yield the frontends for clients outside that have endpoints; frontends without are not
    translated.
    """
    snapshot, flags = Snapshot(maps), maps["settings"].get(0).flags
    node = [address for address, _ in maps["node_addresses"].items()]
    node = [address for address in node if not (address.is_loopback or address.is_link_local)]
    endpoints = {it.service: (it.address, it.port) for it in snapshot.slots.values()}
    for key, service in snapshot.services.items():
        kind, version = frontend_kind(key, service.flags), key.address.version
        if service.id not in endpoints or kind not in _OUTSIDE:
            continue
        is_nodeport = kind == NODE_PORT
        where = f"NodePort {key.port}" if is_nodeport else host_port(key.address, key.port)
        title = f"{where} ({snapshot.service(service.id)})"
        early = is_early(key.protocol, service.flags, flags)
        for address in (
            [it for it in node if it.version == version] if is_nodeport else [key.address]
        ):
            yield Frontend(key.protocol, address, key.port, title, endpoints[service.id], early)


def is_early(protocol: int, service: Flags, settings: Flags) -> bool:
    """Whether the flow tables translate requests before any firewall rule sees them."""
    is_sctp_by_flows = protocol == Protocol.SCTP and "netfilter_sctp" not in settings
    return "netfilter" not in settings or "least_connections" in service or is_sctp_by_flows


class Search:
    """The search for rules that drop requests; ``ways`` has the way of requests by IP version.

    A rule is compared with the frontends that have its address or port, not with all.
    """

    def __init__(self, served: Iterable[Frontend], ways: Mapping[int, Way]) -> None:
        self._frontends, self._ways = list(served), ways
        self.unread = 0  # rules that drop, and may name anything

    def named(self, table: Table) -> Iterator[str]:
        """Yield a line for each rule of this table that drops requests."""
        for base in table.chains.values():
            if base.hook in _HOOKS and not base.is_nat:
                index = _Index([(*it.seen_at(base), it) for it in self._served_by(table)])
                for name, rule in table.reached_from(base):
                    if DROPPING & rule.targets:
                        yield from self._line(table, base, name, rule, index)

    def _served_by(self, table: Table) -> Iterator[Frontend]:
        versions = {"ip": (4,), "ip6": (6,)}.get(table.family, (4, 6))
        return (each for each in self._frontends if each.address.version in versions)

    def _line(
        self, table: Table, base: Chain, name: str, rule: Rule, index: "_Index"
    ) -> Iterator[str]:
        try:
            named = list(islice(index.named_by(rule), _MOST_TRIED))
        except ValueError:
            self.unread += 1
            return
        for address, port, frontend in named:
            way = self._ways[address.version]
            packet = Packet(address, port, way, protocol=frontend.protocol)
            found = fates(table, base, packet)
            if found.keys() <= {Fate.DROP, Fate.DROP_OF_ONE} and rule in found.values():
                where = f"{table.title}, chain {name}: {rule.text}"
                yield f"{where}: drops requests to {frontend.title}"
                return


_Seen = tuple[Address, int, Frontend]


class _Index:
    """The destinations of requests at one chain, by their addresses and by their ports."""

    def __init__(self, seen: list[_Seen]) -> None:
        self._seen = seen
        self._by_address = sorted((number(each[0]), at) for at, each in enumerate(seen))
        self._by_port = sorted((each[1], at) for at, each in enumerate(seen))

    def named_by(self, rule: Rule) -> Iterator[_Seen]:
        """Yield the frontends that a rule names by address, or by port if it names no address.

        Raises ValueError for an unreadable rule.
        """
        asked = [condition for condition in rule.conditions if not condition.negated]
        for condition in sorted(asked, key=lambda it: not it.of_address)[:1]:
            index = self._by_address if condition.of_address else self._by_port
            for first, last in condition.ranges:
                begin, end = bisect_left(index, (first, 0)), bisect_left(index, (last + 1, 0))
                yield from (self._seen[at] for _, at in index[begin:end])
