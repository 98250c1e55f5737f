# SPDX-License-Identifier: Apache-2.0
"""Read the rules of this node and of its pods' network namespaces, and return the findings."""

import errno
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from ebpflb.errors import NodeError
from ebpflb.kernel.netfilter import rulesets
from ebpflb.kernel.netfilter.rulesets import IPSET, Printed, Ruleset
from ebpflb.kernel.node import device_watch, namespaces
from ebpflb.model import kube_proxy
from ebpflb.model.kube_proxy import NFT_TABLE
from ebpflb.model.packet_path import Engine
from ebpflb.tools.firewall import read_iptables, read_nft
from ebpflb.tools.firewall.missed import Frontends, Search, in_force, unjudged
from ebpflb.tools.firewall.rules import Chain, Option, Rule, Table, mark_and_mask

MOST_SHOWN = 20
_UNJUDGED = "rules at this hook are not compared: check whether they name Services"
_LEFT_OUT: set[tuple[str, str]] = {("ip", NFT_TABLE), ("ip6", NFT_TABLE)} | rulesets.OWN_TABLES


@dataclass
class FirewallSurvey:
    """The findings.

    ``found``: each rule that may not see requests to Services, and the remedy; ``notes``: rules
    that were not compared, and why; ``scope``: the Services with which the rules were compared;
    ``per_packet``: the rules of the node that act on each packet.
    """

    scope: str
    found: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    per_packet: list[str] = field(default_factory=list)


def survey(state_directory: Path, engine: Engine) -> FirewallSurvey:
    """Read and compare all rules. Raises NodeError.

    ``engine`` is the expected one if no agent has run.
    """
    settings, frontends, known = in_force(state_directory, engine)
    scope = (
        "misses a Service" if known else "names a NodePort (Services are known only after a start)"
    )
    result = FirewallSurvey(scope)
    search = Search(Frontends(frontends), settings)
    for pod, ruleset in _rulesets(result.notes):
        where = f"pod {pod}: " if pod else ""
        result.notes += [f"{where}{line}" for line in ruleset.unread]
        for table in tables(ruleset.printed, result.notes):
            missed = search.missed(table, in_pod=bool(pod))
            result.found += [(f"{where}{found}", found.remedy) for found in missed]
            result.notes += [f"{where}{chain}: {_UNJUDGED}" for chain in unjudged(table)]
            result.per_packet += [] if pod else per_packet(table)
    result.notes += _incomplete(search)
    return _shortened(result)


def _rulesets(notes: list[str]) -> Iterator[tuple[str, Ruleset]]:
    """Yield the rules of the node's own namespace, then those of its pods, with their addresses."""
    yield "", rulesets.read()
    for path in namespaces.linked():
        try:
            addresses, ruleset = namespaces.call_in(path, _pod)
        except (NodeError, OSError) as error:
            if isinstance(error, OSError) and error.errno in (errno.EPERM, errno.EACCES):
                notes.append("pods: rules in them cannot be read: CAP_SYS_ADMIN is missing")
            continue
        yield addresses or path.name, ruleset


def _pod() -> tuple[str, Ruleset]:
    """Return the pod's addresses, and its rules if it has tables at all; runs in its namespace."""
    found = sorted(
        str(address)
        for device in device_watch.list_devices().devices
        for address in device.sources
        if not device.loopback
    )
    return ", ".join(found[:2]), rulesets.read() if rulesets.are_there() else Ruleset((), ())


def tables(printed: Collection[Printed], notes: list[str]) -> Iterator[Table]:
    """Yield the tables: iptables-nft's as iptables-save prints them, others as nft does."""
    left_out = set(_LEFT_OUT)
    texts = {each.tool: each.text for each in printed}
    ipsets = read_iptables.read_ipsets(texts.pop(IPSET, b"").decode(errors="replace"))
    for tool in sorted(texts, key=lambda name: name == "nft"):
        try:
            if tool == "nft":
                yield from read_nft.read(texts[tool], left_out)
                continue
            found = read_iptables.read(texts[tool].decode(errors="replace"), tool, ipsets)
        except (ValueError, LookupError) as error:
            notes.append(f"{tool}: its output cannot be read: {error}")
            continue
        if tool.endswith("-nft"):
            family = "ip6" if tool.startswith("ip6") else "ip"
            left_out |= {(family, table.title.rpartition(" ")[2]) for table in found}
        yield from found


def _incomplete(search: Search) -> Iterator[str]:
    if search.skipped:
        yield f"{search.skipped} rules cannot be read in full: not compared"
    if not search.steps:
        yield "too many rules and Services: not all were compared"


def _shortened(result: FirewallSurvey) -> FirewallSurvey:
    found, notes = list(dict.fromkeys(result.found)), list(dict.fromkeys(result.notes))
    if len(found) > MOST_SHOWN:
        notes.append(f"{len(found) - MOST_SHOWN} more rules like these")
    return replace(result, found=found[:MOST_SHOWN], notes=notes[:MOST_SHOWN])


# Rules that act on each packet of a connection between devices: with --fast-forward they miss
# packets of established flows (docs/limits.md).
#
# Left out are rules after one that takes all established connections, rules for other states, and
# NAT, which only sees the first packet.

_HOOKS = ("prerouting", "forward", "postrouting")
_STATES = frozenset({"new", "established", "related", "invalid", "untracked"})  # conntrack's
_SILENT = {"-m", "-j", "-g", "--comment", "--counter", "--ctstate", "--state"}
_TAKING = {"ACCEPT", "DROP", "REJECT"}
_DOES = {  # by target or option
    "logs": {"LOG", "NFLOG", "ULOG"},
    "changes": {"DSCP", "TOS", "TTL", "HL", "CLASSIFY"},
    "marks": {"MARK", "CONNMARK"},
    "queues": {"NFQUEUE"},
    "copies": {"TEE"},
    "counts": {"--quota", "--connbytes", "--counter"},
    "limits": {"--limit", "--hashlimit-name"},
}
_MARKS = ("--set-xmark", "--set-mark", "--or-mark")


def per_packet(table: Table) -> Iterator[str]:
    """Yield a line for each such rule."""
    taking: dict[str, bool] = {}
    for chain in table.chains.values():
        if chain.hook in _HOOKS and not chain.is_nat:
            yield from _of_chain(table, chain, taking)


def _of_chain(table: Table, chain: Chain, taking: dict[str, bool]) -> Generator[str, None, bool]:
    """Return whether the chain takes every packet of established connections.

    ``taking`` has the results for earlier chains.
    """
    if chain.name in taking or kube_proxy.is_chain(chain.name):
        return taking.get(chain.name, False)
    taking[chain.name] = False
    for rule in chain.rules:
        states = _states(rule)
        if states and "established" not in states:
            continue
        if done := _done(rule):
            yield f"{table.title}, chain {chain.name}: {rule.text}: {done} each packet"
        takes = bool(_TAKING & rule.targets)
        for name in rule.targets & table.chains.keys():
            takes = yield from _of_chain(table, table.chains[name], taking)
        if takes and _SILENT.issuperset(option.name for option in rule.options):
            taking[chain.name] = True
            break
    return taking[chain.name]


def _done(rule: Rule) -> str:
    """Return the action.

    A mark that is cleared or restored is left out, and tests for TCP's SYN.
    """
    names = {option.name for option in rule.options}
    if names & {"--tcp-flags", "--syn"}:
        return ""
    targets = rule.targets if any(map(_sets_bits, rule.options)) else rule.targets - _DOES["marks"]
    return next((word for word, causes in _DOES.items() if causes & (names | targets)), "")


def _sets_bits(option: Option) -> bool:
    try:
        return option.name in _MARKS and mark_and_mask(option.value)[0] != 0
    except ValueError:
        return False


def _states(rule: Rule) -> frozenset[str]:
    """Return the connection states that the rule tests for; empty for any."""
    for option in rule.options:
        asked = _STATES.intersection(option.value.lower().split(","))
        if option.name in ("--ctstate", "--state") and asked:
            return _STATES - asked if option.negated else asked
    return frozenset()
