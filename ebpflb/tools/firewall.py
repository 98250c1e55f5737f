# SPDX-License-Identifier: Apache-2.0
"""What this node's firewall rules do to the traffic of Services (docs/firewalls.md).

The rules are read by ebpflb.kernel.netfilter.firewall.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from enum import Enum, auto
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct

from ebpflb.entries.services import NODE_PORT, Flags, frontend_kind
from ebpflb.errors import EbpflbError, NodeError, in_words
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.netfilter.each_packet import each_packet
from ebpflb.kernel.netfilter.firewall import FORWARD, Chain, Rule, Table, tables, tools
from ebpflb.kernel.node import device_watch, routes
from ebpflb.model import kube_proxy
from ebpflb.model.addresses import Address, host_port, number, parse_address, parse_network
from ebpflb.model.kube_proxy import IptablesTable, Option, is_chain, read_options
from ebpflb.model.services import Protocol
from ebpflb.tools import pins
from ebpflb.tools.snapshot import Snapshot

# What the rules of a hook do with a packet: all rules that it reaches, in order. A rule may test
# something unknown about the packet: marks, sets, rates, the client's address. Such a rule may
# match or not, so there may be several results.

_SILENT = {  # matched already, or no condition
    *("-d", "--dst-range", "daddr", "--dport", "--dports", "dport"),
    *("-p", "protocol", "nexthdr", "l4proto", "--syn"),
    *("-j", "-g", "-m", "--comment", "--reject-with", "--log-prefix", "--log-level"),
    *("comment", "counter", "log", "return", "queue"),
}
_KUBE_MARK = "0x4000/0x4000"
_TAKING = {"ACCEPT", "QUEUE", "NFQUEUE", "queue"}  # a program that is asked may accept
DROPPING = {"DROP", "REJECT"}
_RETURNING = {"RETURN", "return"}


class Way(NamedTuple):
    """How requests from clients outside come to this node.

    ``near`` has the node's addresses at ``device``; ``inside`` has those at its other devices: no
    client outside is in a network that contains one of them.
    """

    device: str
    near: frozenset[Address]
    inside: frozenset[Address]


class Packet(Struct, frozen=True):
    """The first packet of a connection from a client outside.

    ``leaves``: the device by which it leaves; "" before routing. ``marked``: with the mark that
    kube-proxy's chains test; ``dnat``: conntrack has translated it.
    """

    address: Address
    port: int
    way: Way
    leaves: str = ""
    marked: bool = True
    dnat: bool = True
    protocol: int = Protocol.TCP


class Fate(Enum):
    ACCEPT = auto()
    DROP = auto()
    DROP_OF_ONE = auto()  # by a rule for this destination alone, as network policies have them
    NEXT = auto()  # no rule of the chain decides


Fates = dict[Fate, Rule | None]
"""What may become of a packet, each with the first rule for it; None: the chain's policy."""


def fates(table: Table, chain: Chain, packet: Packet, *, with_kube_proxy: bool = False) -> Fates:
    """Return the packet's possible fates at a base chain; kube-proxy's chains count on request.

    A rule that cannot be read may match.
    """
    found = _Walk(table, packet, with_kube_proxy=with_kube_proxy).chain(chain.name)
    if Fate.NEXT in found:
        del found[Fate.NEXT]
        found.setdefault(Fate.DROP if chain.policy == "DROP" else Fate.ACCEPT, None)
    return found


def may_drop(table: Table, chain: Chain) -> bool:
    """Whether the chain, or a chain that it leads to, drops anything."""
    rules = (rule for _, rule in table.reached_from(chain))
    return chain.policy == "DROP" or any(DROPPING & rule.targets for rule in rules)


class _Walk:
    """One packet's walk. A chain's result does not depend on the rule that jumps to it."""

    def __init__(self, table: Table, packet: Packet, *, with_kube_proxy: bool) -> None:
        self._table, self._packet, self._with_kube_proxy = table, packet, with_kube_proxy
        self._known: dict[str, Fates] = {}

    def chain(self, name: str) -> Fates:
        if name not in self._known:
            self._known[name] = {Fate.NEXT: None}  # a loop, which netfilter refuses
            self._known[name] = self._of_rules(self._table.chains[name].rules)
        return dict(self._known[name])

    def _of_rules(self, rules: list[Rule]) -> Fates:
        found: Fates = {}
        for rule in rules:
            match = matches(rule, self._packet)
            if match is False:
                continue
            of_rule, goes_on = self._of_rule(rule)
            for fate, by in of_rule.items():
                found.setdefault(fate, by)
            if match and not goes_on:
                return found
        found.setdefault(Fate.NEXT, None)
        return found

    def _of_rule(self, rule: Rule) -> tuple[Fates, bool]:
        """Return the fates after a matching rule, and whether the packet may go on to the next
        rule.
        """
        actions = rule.targets | rule.names
        if actions & _TAKING:
            return {Fate.ACCEPT: rule}, False
        if actions & DROPPING:
            one = is_about_one(rule, self._packet.address)
            return {Fate.DROP_OF_ONE if one else Fate.DROP: rule}, False
        if actions & _RETURNING:
            return {Fate.NEXT: rule}, False
        for target in rule.targets & self._table.chains.keys():
            if self._with_kube_proxy or not kube_proxy.is_chain(target):
                return self._of_jump(rule, self.chain(target))
        return {}, True

    def _of_jump(self, rule: Rule, found: Fates) -> tuple[Fates, bool]:
        """Return the fates after a jump, which may return, or a goto, which does not."""
        comes_back = Fate.NEXT in found and "-g" not in rule.names
        if comes_back:
            del found[Fate.NEXT]
        if Fate.DROP in found and is_about_one(rule, self._packet.address):
            found[Fate.DROP_OF_ONE] = found.pop(Fate.DROP)
        return found, comes_back


def is_about_one(rule: Rule, address: Address) -> bool:
    """Whether the rule names this destination by its address, not by a network."""
    try:
        alone = number(address), number(address)
        return any(alone in each.ranges for each in rule.conditions if not each.negated)
    except ValueError:
        return False


def matches(rule: Rule, packet: Packet) -> bool | None:
    """Whether the rule matches the packet; None if unknown."""
    try:
        hold = [_holds(option, packet) for option in rule.options]
        if rule.asks_for_original:
            hold.append(None)
        else:
            hold.append(rule.matches(packet.protocol, number(packet.address), packet.port))
    except ValueError:
        return None
    return False if False in hold else None if None in hold else True


def _holds(option: Option, packet: Packet) -> bool | None:
    """Whether a condition that is not about the destination holds. Raises ValueError."""
    if option.name in _SILENT:
        return True
    holds = _holds_if_not_negated(option.name, option.value, packet)
    return holds if holds is None else holds != option.negated


def _holds_if_not_negated(name: str, value: str, packet: Packet) -> bool | None:
    values = value.split(",")
    match name:
        case "-s" | "saddr":
            return _any([_is_client(each, packet) for each in values])
        case "-i" | "iif" | "iifname":
            return any(_is_device(packet.way.device, each) for each in values)
        case "-o" | "oif" | "oifname":
            return any(_is_device(packet.leaves, each) for each in values)
        case "--mark" if value == _KUBE_MARK:
            return packet.marked
        case "--ctstate" | "--state" | "state" | "--ctstatus" | "status":
            states = {each.upper() for each in values}
            return "NEW" in states or ("DNAT" in states and packet.dnat)
        case "nfproto":
            return f"ipv{packet.address.version}" in values
    return None


def _is_client(network: str, packet: Packet) -> bool | None:
    """Whether the client is in this network; None if this is unknown. Raises ValueError."""
    parsed = parse_network(network)
    if parsed.version != packet.address.version:
        return False
    if not parsed.prefixlen:
        return True
    is_inside = any(address in parsed for address in (*packet.way.inside, packet.address))
    has_clients = not is_inside or any(address in parsed for address in packet.way.near)
    return None if has_clients else False


def _any(hold: list[bool | None]) -> bool | None:
    return True if True in hold else None if None in hold else False


def _is_device(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern[-1:] in ("+", "*") else name == pattern


# Whether the rules of FORWARD drop requests from clients outside to pods of this node.
#
# kube-proxy's chains accept the traffic that it masquerades, in its modes iptables and ipvs. ebpflb
# has no such rule, and does not masquerade traffic that stays on the node. If no other rule accepts
# requests to pods, they time out as soon as ebpflb serves; with --masquerade-local-backends, when
# kube-proxy's rules are gone. Only a drop of every such packet counts: not one that depends on
# unknown properties of the packet, and not one for a single pod.

_MOST_SLOTS, _MOST_PODS = 4096, 8  # limits of the search

Endpoint = tuple[Address, int]


class Dropping(NamedTuple):
    """The traffic that one tool's rules drop.

    ``now`` is true if the rules drop it already, and false if ebpflb may cause the drop, or if this
    is unknown.
    """

    tool: str
    now: bool
    says: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.tool}: {self.says}: {self.remedy}"


def dropping(state_directory: Path) -> list[Dropping]:
    """Return the traffic that FORWARD drops, or may drop, in this thread's network namespace."""
    unread = list[str]()
    found = [each for table in tables(unread, FORWARD) for each in _judged(table, state_directory)]
    return found + [_unknown(*line.split(": ", 1)) for line in unread]


def _unknown(tool: str, why: str) -> Dropping:
    says = f"unknown whether FORWARD drops requests to pods: {why}"
    return Dropping(tool, False, says, "look at `iptables -S FORWARD` and `nft list ruleset`")


def _judged(table: Table, state_directory: Path) -> Iterator[Dropping]:
    """Yield at most one result for each chain, for the first pod whose requests are dropped."""
    at = [chain for chain in table.chains.values() if chain.hook == "forward"]
    at = [chain for chain in at if may_drop(table, chain)]
    try:
        packets = list(_packets(table.family, state_directory)) if at else []
    except (EbpflbError, OSError) as error:
        yield _unknown(table.title.partition(",")[0], in_words(error))
        return
    for chain in at:
        results = (_result(table, chain, packet) for packet in packets)
        yield from islice((each for each in results if each), 1)


def _result(table: Table, chain: Chain, packet: Packet) -> Dropping | None:
    """Return the traffic that is certainly dropped, except by a rule for this pod only."""
    found = fates(table, chain, packet)
    if found.keys() != {Fate.DROP}:
        return None
    by = f" ({rule.text})" if (rule := found[Fate.DROP]) else ""
    held = fates(table, chain, packet, with_kube_proxy=True).keys() != {Fate.DROP}
    who = "only kube-proxy's chains accept" if held else "no rule accepts"
    says = f"{chain.name} drops by default{by}, and {who} requests from outside to pods"
    then = "they time out with ebpflb" if held else "NodePorts time out"
    remedy = f"{then}: {_rule_for(table, chain)}, and the same for what pods send"
    name = table.title.partition(",")[0]
    return Dropping(name, not held, f"{says}, such as {packet.address}", remedy)


def _rule_for(table: Table, chain: Chain) -> str:
    """Return a command that accepts requests to PODS, the pods' network."""
    if table.title.startswith("table"):
        version = "ip6" if table.family == "ip6" else "ip"
        where = f"{table.title.removeprefix('table ')} {chain.name}"
        return f"nft insert rule {where} {version} daddr PODS accept"
    return f"{table.title.partition('-')[0]} -I FORWARD -d PODS -j ACCEPT (PODS: their network)"


def _packets(family: str, state_directory: Path) -> Iterator[Packet]:
    """Yield requests to some pods with a Service for clients outside.

    Raises NodeError if the pods are unknown.
    """
    for version in {"ip": (4,), "ip6": (6,)}.get(family, (4, 6)):
        yield from _packets_of(version, state_directory)


def _packets_of(version: int, state_directory: Path) -> Iterator[Packet]:
    way = way_of(version)
    endpoints, marked, dnat = _endpoints(version, state_directory)
    pods = {each for each in endpoints if each[0].version == version} if way.device else set()
    pods = {each for each in pods if each[0] not in way.near | way.inside}
    for address, port in islice(sorted(pods), _MOST_PODS):
        route = routes.route_to(address)
        if route.ifindex and route.device != way.device:
            yield Packet(address, port, way, route.device, marked, dnat)


def way_of(version: int) -> Way:
    """Return how requests enter this thread's network namespace: by the default route's device.

    Raises NodeError.
    """
    devices = device_watch.list_devices().devices
    uplink = next(routes.default_devices(version), 0)
    here = [device for device in devices if device.index == uplink]
    near = {address for device in here for address in device.addresses}
    own = {address for device in devices for address in device.addresses}
    return Way(next((it.name for it in here), ""), frozenset(near), frozenset(own - near))


def _endpoints(version: int, state_directory: Path) -> tuple[set[Endpoint], bool, bool]:
    """Return the endpoints for clients outside, whether requests to them are masqueraded, and
    whether conntrack translates them.

    Raises NodeError.
    """
    with pins.maps_if_any(state_directory) as maps:
        if maps is None:
            return _endpoints_of_kube_proxy(version), True, True
        flags = maps["settings"].get(0).flags
        marked = "shadow" in flags or {"netfilter", "masquerade_here"} <= flags
        dnat = not flags.isdisjoint({"shadow", "netfilter"})
        return _endpoints_in_maps(maps), marked, dnat


def _endpoints_in_maps(maps: Mapping[str, Map]) -> set[Endpoint]:
    """Return the endpoints on this node."""
    blocks = {
        entry.block
        for frontend, entry in maps["services"].items()
        if "external" in entry.flags and frontend.protocol == Protocol.TCP
    }
    slots = (slot for block in blocks for slot in maps["slots"].get_range(*block))
    return {(s.address, s.port) for s in islice(slots, _MOST_SLOTS) if "here" in s.flags}


def _endpoints_of_kube_proxy(version: int) -> set[Endpoint]:
    """Return the endpoints in kube-proxy's iptables rules. Raises NodeError."""
    family = "iptables" if version == 4 else "ip6tables"
    found = [tool.table("nat") for tool in tools() if tool.family == family]
    mine = [table for table in found if table and "KUBE-NODEPORTS" in table.chains]
    if not mine:
        raise NodeError("pods are only known while an agent runs")
    return {each for table in mine for each in _endpoints_in(table)}


def _endpoints_in(table: IptablesTable) -> Iterator[Endpoint]:
    if all(rule.chain != "KUBE-NODEPORTS" for rule in table.rules):
        return
    options = [
        {option.name: option.value for option in read_options(rule.text)}
        for rule in table.rules
        if is_chain(rule.chain)
    ]
    destinations = [it.get("--to-destination", "") for it in options if it.get("-p") == "tcp"]
    for host, _, port in (each.rpartition(":") for each in destinations if each):
        yield parse_address(host.strip("[]")), int(port)


# Which firewall rules drop requests from clients outside to Services, or act on each packet of a
# flow.
#
# Only rules that drop every such request count, whatever the client, and only at PREROUTING and
# ingress: FORWARD is for ``forwarding``.

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
