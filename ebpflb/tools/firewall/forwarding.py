# SPDX-License-Identifier: Apache-2.0
"""Whether the rules of FORWARD drop requests from clients outside to pods of this node.

kube-proxy's chains accept the traffic that it masquerades, in its modes iptables and ipvs. ebpflb
has no such rule, and does not masquerade traffic that stays on the node. If no other rule accepts
requests to pods, they time out as soon as ebpflb serves; with --masquerade-local-backends, when
kube-proxy's rules are gone. Only a drop of every such packet counts: not one that depends on
unknown properties of the packet, and not one for a single pod.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ebpflb.errors import EbpflbError, NodeError, in_words
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.netfilter.firewall import FORWARD, Chain, Table, tables, tools
from ebpflb.kernel.node import device_watch, routes
from ebpflb.model.addresses import Address, parse_address
from ebpflb.model.kube_proxy import IptablesTable, is_chain, read_options
from ebpflb.model.services import Protocol
from ebpflb.tools import pins
from ebpflb.tools.firewall.walk import Fate, Packet, Way, fates, may_drop

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
