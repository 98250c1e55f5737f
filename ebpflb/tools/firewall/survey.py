# SPDX-License-Identifier: Apache-2.0
"""Read the rules of this node, and return the findings."""

from collections.abc import Collection, Generator, Iterator
from pathlib import Path

from msgspec import Struct

from ebpflb.kernel.netfilter import rulesets
from ebpflb.kernel.netfilter.rulesets import Printed
from ebpflb.model import kube_proxy
from ebpflb.model.kube_proxy import NFT_TABLE
from ebpflb.model.packet_path import Engine
from ebpflb.tools.firewall import read_nft
from ebpflb.tools.firewall.named import Frontends, Search, in_force
from ebpflb.tools.firewall.rules import Chain, Rule, Table, read_iptables

MOST_SHOWN = 20
_LEFT_OUT: set[tuple[str, str]] = {("ip", NFT_TABLE), ("ip6", NFT_TABLE)} | rulesets.OWN_TABLES


class FirewallSurvey(Struct):
    """The findings.

    ``named``: rules that name a Service and may not match its requests; ``per_packet``: rules that
    act on each packet; ``notes``: what could not be read, and why; ``scope``: the Services with
    which the rules were compared.
    """

    scope: str
    named: list[str]
    per_packet: list[str]
    notes: list[str]


def survey(state_directory: Path, engine: Engine) -> FirewallSurvey:
    """Read and compare all rules. Raises NodeError.

    ``engine`` is the expected one if no agent has run.
    """
    settings, frontends, known = in_force(state_directory, engine)
    scope = (
        "misses a Service" if known else "names a NodePort (Services are known only after a start)"
    )
    search, ruleset = Search(Frontends(frontends), settings), rulesets.read()
    notes = list(ruleset.unread)
    found = list(tables(ruleset.printed, notes))
    named = list(dict.fromkeys(str(each) for table in found for each in search.named(table)))
    if search.unread:
        notes.append(f"{search.unread} rules cannot be read in full: not compared")
    if len(named) > MOST_SHOWN:
        notes.append(f"{len(named) - MOST_SHOWN} more rules like these")
    per_packet = [line for table in found for line in each_packet(table)]
    return FirewallSurvey(scope, named[:MOST_SHOWN], per_packet, notes)


def tables(printed: Collection[Printed], notes: list[str]) -> Iterator[Table]:
    """Yield the tables: iptables-nft's as iptables-save prints them, others as nft does."""
    left_out = set(_LEFT_OUT)
    texts = {each.tool: each.text for each in printed}
    for tool in sorted(texts, key=lambda name: name == "nft"):
        try:
            if tool == "nft":
                yield from read_nft.read(texts[tool], left_out)
                continue
            found = read_iptables(texts[tool], tool)
        except (ValueError, LookupError) as error:
            notes.append(f"{tool}: its output cannot be read: {error}")
            continue
        if tool.endswith("-nft"):
            family = "ip6" if tool.startswith("ip6") else "ip"
            left_out |= {(family, table.title.rpartition(" ")[2]) for table in found}
        yield from found


# Which rules act on each packet of a connection between devices.
#
# With --fast-forward they miss packets of established flows (docs/configuration.md). Left out are
# rules after one that takes all established connections, rules for other states, NAT, which only
# sees the first packet, and marks: `ip rule` shows those that routes depend on.

_HOOKS = ("prerouting", "forward", "postrouting")
_STATES = frozenset({"new", "established", "related", "invalid", "untracked"})  # conntrack's
_SILENT = {"-m", "-j", "-g", "--comment", "--counter", "--ctstate", "--state"}
_TAKING = {"ACCEPT", "DROP", "REJECT"}
_DOES = {  # by target or option
    "logs": {"LOG", "NFLOG", "ULOG"},
    "changes": {"DSCP", "TOS", "TTL", "HL", "CLASSIFY"},
    "queues": {"NFQUEUE"},
    "copies": {"TEE"},
    "counts": {"--quota", "--connbytes", "--counter"},
    "limits": {"--limit", "--hashlimit-name"},
}


def each_packet(table: Table) -> Iterator[str]:
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
    """Return the action; "" for tests for TCP's SYN."""
    names = {option.name for option in rule.options}
    if names & {"--tcp-flags", "--syn"}:
        return ""
    return next((word for word, causes in _DOES.items() if causes & (names | rule.targets)), "")


def _states(rule: Rule) -> frozenset[str]:
    """Return the connection states that the rule tests for; empty for any."""
    for option in rule.options:
        asked = _STATES.intersection(option.value.lower().split(","))
        if option.name in ("--ctstate", "--state") and asked:
            return _STATES - asked if option.negated else asked
    return frozenset()
