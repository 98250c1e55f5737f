# SPDX-License-Identifier: Apache-2.0
"""Reads the rules of this node and of its pods' network namespaces, and returns the findings."""

import errno
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ebpflb.datapath.maps.state_dir import StateDir
from ebpflb.diagnose.firewall import advice, iptables_parser, nft_parser
from ebpflb.diagnose.firewall.ipset import Sets
from ebpflb.diagnose.firewall.matches import number
from ebpflb.diagnose.firewall.per_packet import per_packet
from ebpflb.diagnose.firewall.rule_search import RuleSearch
from ebpflb.diagnose.firewall.rules import FirewallTable
from ebpflb.diagnose.firewall.service_traffic import (
    NodeState,
    Traffic,
    by_family,
    expected,
    programmed,
)
from ebpflb.diagnose.snapshot import Snapshot
from ebpflb.errors import NodeError
from ebpflb.model.addresses import Address
from ebpflb.model.kube_proxy import NFT_TABLE
from ebpflb.model.packet_mark import OFF, PacketMark
from ebpflb.model.packet_path import Engine
from ebpflb.node import device_watch, namespaces, policy_rules, rulesets
from ebpflb.node.rulesets import IPSET, Printed, Ruleset

MOST_SHOWN = 20
_KUBE_PROXY = {("ip", NFT_TABLE), ("ip6", NFT_TABLE)}
_LEFT_OUT: set[tuple[str, str]] = _KUBE_PROXY | rulesets.OWN_TABLES


@dataclass
class FirewallSurvey:
    """``found``: each rule that does not see services, and what to do; ``notes``: what was not
    compared, and why; ``scope``: which services the rules were compared with; ``per_packet``: the
    rules of the node that do something with each packet.
    """

    scope: str
    found: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    per_packet: list[str] = field(default_factory=list)


def survey(state_directory: Path, engine: Engine) -> FirewallSurvey:
    """``engine`` is the one to expect where no agent has run. Raises NodeError."""
    traffic, node, known = _in_force(state_directory, engine)
    result = FirewallSurvey(
        "misses a service" if known else "names a NodePort (services are known when an agent runs)"
    )
    for search, ruleset, pod in _searches(traffic, node, result.notes):
        for table in tables(ruleset.printed, result.notes):
            search.add([table])
            result.per_packet += [] if pod else per_packet(table)
        where = f"pod {pod}: " if pod else ""
        result.found += [
            (where + advice.line(each), advice.remedy(each, node)) for each in search.findings
        ]
        result.notes += [f"{where}{line}" for line in _incomplete(search, ruleset)]
    return _shortened(result)


def _searches(
    traffic: Traffic, node: NodeState, notes: list[str]
) -> Iterator[tuple[RuleSearch, Ruleset, str]]:
    """In the node's own namespace, then in those of its pods; all of them share the steps."""
    search = RuleSearch(traffic, node)
    yield search, rulesets.read(), ""
    for path in namespaces.linked():
        steps = search.steps
        if steps <= 0:
            return
        try:
            addresses, ruleset = namespaces.call_in(path, _pod)
        except (NodeError, OSError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EPERM, errno.EACCES):
                notes.append("pods: rules in them cannot be read: CAP_SYS_ADMIN is missing")
            continue
        search = RuleSearch(traffic, node, in_pod=True, steps=steps)
        yield search, ruleset, addresses or path.name


def _pod() -> tuple[str, Ruleset]:
    """Called in a pod's namespace: its addresses, and its rules if it has tables at all."""
    found = sorted(
        str(address)
        for device in device_watch.list_devices().devices
        for address in device.sources
        if not device.loopback
    )
    return ", ".join(found[:2]), rulesets.read() if rulesets.are_there() else Ruleset((), ())


def tables(printed: Collection[Printed], notes: list[str]) -> Iterator[FirewallTable]:
    """Those of iptables-nft as iptables-save prints them, the rest as nft does."""
    left_out = set(_LEFT_OUT)
    sets = Sets(
        "".join(each.text.decode(errors="replace") for each in printed if each.tool == IPSET)
    )
    for tool, text in sorted(printed, key=lambda each: each.tool == "nft"):
        if tool == IPSET:
            continue
        try:
            if tool == "nft":
                yield from nft_parser.parse(text, without=frozenset(left_out))
                continue
            found = iptables_parser.parse(text.decode(errors="replace"), tool, sets)
        except (ValueError, LookupError) as error:
            notes.append(f"{tool}: its output cannot be read: {error}")
            continue
        if tool.endswith("-nft"):
            family = "ip6" if tool.startswith("ip6") else "ip"
            left_out |= {(family, table.title.rpartition(" ")[2]) for table in found}
        yield from found


def _incomplete(search: RuleSearch, ruleset: Ruleset) -> Iterator[str]:
    yield from ruleset.unread
    if search.skipped:
        yield f"rules that ask for what is not known here: {search.skipped} not compared"
    for chain in search.unjudged:
        yield f"{chain}: rules at such a hook cannot be judged: look whether they name services"
    if not search.complete:
        yield "too many rules: not all were compared"


def _shortened(result: FirewallSurvey) -> FirewallSurvey:
    found, more = result.found[:MOST_SHOWN], len(result.found) - MOST_SHOWN
    notes = list(dict.fromkeys(result.notes))
    if more > 0:
        notes.append(f"{more} more rules like these")
    return FirewallSurvey(result.scope, found, notes[:MOST_SHOWN], result.per_packet)


def _in_force(state_directory: Path, engine: Engine) -> tuple[Traffic, NodeState, bool]:
    """From the maps if there are any; the last is False if there are none."""
    devices = device_watch.list_devices()
    marks = policy_rules.marks()
    try:
        maps = StateDir(state_directory).read_maps()
    except NodeError:
        node = _node(engine, devices.addresses, devices.addresses, marks)
        return Traffic(expected(), node), node, False
    try:
        settings = maps["settings"].get(0)
        in_force = Engine.NETFILTER if "netfilter" in settings.flags else Engine.FLOWS
        serving = [address for address, _ in maps["node_addresses"].items()]
        node = _node(
            in_force,
            devices.addresses,
            serving,
            marks,
            host_sockets="host_sockets" in settings.flags,
            mark=PacketMark(settings.mark, settings.mark_mask),
        )
        sctp = "netfilter_sctp" in settings.flags
        return Traffic(programmed(Snapshot.read(maps), sctp=sctp), node), node, True
    finally:
        for opened in maps.values():
            opened.close()


def _node(
    engine: Engine,
    own: Iterable[Address],
    serving: Iterable[Address],
    marks: set[int],
    *,
    host_sockets: bool = False,
    mark: PacketMark = OFF,
) -> NodeState:
    nodeports = [a for a in serving if not (a.is_loopback or a.is_link_local)]
    return NodeState(
        engine,
        frozenset(number(address) for address in own),
        by_family(nodeports),
        host_sockets,
        mark,
        marks,
    )
