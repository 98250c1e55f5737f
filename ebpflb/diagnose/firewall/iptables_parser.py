# SPDX-License-Identifier: Apache-2.0
"""Reads the rules of iptables-save (iptables-extensions(8)).

What cannot be read makes its rule one that cannot be compared, and nothing else.
"""

import itertools
import re
from collections.abc import Callable, Iterator

from ebpflb.diagnose.firewall.ipset import Sets
from ebpflb.diagnose.firewall.matches import (
    AnyMatch,
    Match,
    Ranges,
    Truth,
    Unknown,
    address_range,
    mark_match,
    port_range,
)
from ebpflb.diagnose.firewall.nft_match import PROTOCOL_NUMBERS
from ebpflb.diagnose.firewall.rules import (
    FILTER,
    MANGLE,
    NAT_DST,
    NAT_SRC,
    RAW,
    SECURITY,
    STATES,
    Chain,
    Does,
    FirewallRule,
    FirewallTable,
)
from ebpflb.model import iptables_rules

_PRIORITIES = {"raw": RAW, "mangle": MANGLE, "filter": FILTER, "security": SECURITY}
_BUILT_IN = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")
_LONGEST = 160  # of a rule's text that is shown
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')
_ALL_BITS = 0xFFFFFFFF
_TARGETS = {
    "ACCEPT": Does.ACCEPT,
    "RETURN": Does.ACCEPT,
    "DROP": Does.DROP,
    "REJECT": Does.DROP,
    "MARK": Does.MARK,
    "CONNMARK": Does.MARK,
    "REDIRECT": Does.NAT,
    "DNAT": Does.NAT,
    "TPROXY": Does.NAT,
    "NOTRACK": Does.UNTRACK,
}
_ENDING = {"ACCEPT", "DROP", "REJECT", "RETURN"}
_EXACT = {  # what is read in full, and what asks nothing
    *("-d", "--dst-range", "--dport", "--dports", "-p"),
    *("--ctorigdst", "--ctorigdstport", "--ctreplsrc", "--ctreplsrcport"),
    *("-m", "-j", "--comment", "--reject-with"),
}
_STATES = ("--ctstate", "--state")
_SILENT = {"-m", "-j", "-g", "--comment", *_STATES}  # of a rule that asks for states alone
_EACH_TARGET = {  # what a target does with each packet
    "logs": ("LOG", "NFLOG", "ULOG"),
    "changes": ("DSCP", "TOS", "TTL", "HL", "CLASSIFY"),
    "marks": ("MARK", "CONNMARK"),
    "queues": ("NFQUEUE",),
    "copies": ("TEE",),
}
_EACH_MATCH = {"counts": {"--quota", "--connbytes"}, "limits": {"--limit", "--hashlimit-name"}}
_MARKS = ("--set-xmark", "--set-mark", "--or-mark")


def parse(saved: str, tool: str, sets: Sets | None = None) -> list[FirewallTable]:
    """The tables; ``tool`` is iptables or ip6tables with its variant, as "iptables-nft"."""
    family = 6 if tool.startswith("ip6") else 4
    tables = iptables_rules.parse(saved)
    return [_table(table, tool, family, sets or Sets()) for table in tables]


def _table(
    found: iptables_rules.IptablesTable, tool: str, family: int, sets: Sets
) -> FirewallTable:
    table = FirewallTable(f"{tool}, table {found.name}", family)
    for name in found.chains:
        hook = name.lower() if name in _BUILT_IN else ""
        drops = found.policies.get(name) == "DROP"
        priority = _priority(found.name, hook)
        table.chains[name] = Chain(name, hook, priority, found.name == "nat", drops)
    for rule in found.rules:
        chain = table.chains.get(rule.chain)
        if chain:
            chain.rules.append(_rule(rule.text, found.chains, sets))
    return table


def _priority(table: str, hook: str) -> int:
    if table == "nat":
        return NAT_SRC if hook in ("input", "postrouting") else NAT_DST
    return _PRIORITIES.get(table, FILTER)


def _rule(text: str, chains: dict[str, bool], sets: Sets) -> FirewallRule:
    words = list(options(text))
    values = {name: value for name, value, _ in words}
    target = values.get("-j", values.get("-g", ""))
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
    does = _TARGETS.get(target, Does.NOTHING)
    if target == "CT" and "--notrack" in values:
        does = Does.UNTRACK
    return FirewallRule(
        shown,
        _matches(words, sets),
        does,
        jump=target if target in chains else "",
        mark=_mark(values),
        ends=target in _ENDING and all(map(_is_exact, words)),
        each=_each(target, values),
        states=_states(words),
        only_states=target != "RETURN" and _SILENT.issuperset(values),
    )


def _each(target: str, values: dict[str, str]) -> str:
    """A mark that is cleared or restored is left out, and what asks for SYN."""
    if "--tcp-flags" in values or "--syn" in values:
        return ""
    target = "" if target in _EACH_TARGET["marks"] and not _mark(values) else target
    by_target = (done for done, targets in _EACH_TARGET.items() if target in targets)
    by_match = (done for done, names in _EACH_MATCH.items() if names & values.keys())
    return next(itertools.chain(by_target, by_match), "")


def _states(words: list[tuple[str, str, bool]]) -> frozenset[str]:
    for name, value, negated in words:
        asked = frozenset(value.lower().split(","))
        if name in _STATES and asked & STATES:
            return STATES - asked if negated else asked & STATES
    return frozenset()


def _is_exact(option: tuple[str, str, bool]) -> bool:
    """Whether ``_matches`` gives all that the option asks, if it asks anything."""
    name, value, _ = option
    return name in _EXACT or (name, value) == ("--ctstate", "DNAT")


def options(text: str) -> Iterator[tuple[str, str, bool]]:
    """Each option, the words that follow it, and whether a "!" is before it."""
    name = ""
    words: list[str] = []
    negated = next_negated = False
    for word in _WORD.findall(text):
        if word == "!":
            next_negated = True
            continue
        if word.startswith("-") and not word[1:2].isdigit():
            if name:
                yield name, " ".join(words), negated
            name, words, negated, next_negated = word, [], next_negated, False
        else:
            words.append(word)
    if name:
        yield name, " ".join(words), negated


def _matches(words: list[tuple[str, str, bool]], sets: Sets) -> tuple[AnyMatch, ...]:
    found: list[AnyMatch] = []
    for name, value, negated in words:
        try:
            if name == "--match-set":
                found += _in_set(value, negated, sets)
            elif name in _READERS:
                found += _READERS[name](value, negated)
        except (ValueError, LookupError):
            found.append(Unknown(f"{name} {value}"))
    return tuple(found)


def _addresses(field: str) -> Callable[[str, bool], list[AnyMatch]]:
    return lambda value, negated: [Match(field, Ranges([address_range(value)]), negated)]


def _ports(field: str) -> Callable[[str, bool], list[AnyMatch]]:
    return lambda value, negated: [
        Match(field, Ranges(port_range(each) for each in value.split(",")), negated)
    ]


def _protocol(value: str, negated: bool) -> list[AnyMatch]:
    number = PROTOCOL_NUMBERS.get(value) or (int(value) if value.isdigit() else -1)
    return [Match("protocol", Ranges([(number, number)]), negated)] if value != "all" else []


def _local(value: str, negated: bool) -> list[AnyMatch]:
    return [Truth("local", negated != ("LOCAL" not in value.split(",")))]


def _dnat(value: str, negated: bool) -> list[AnyMatch]:
    return [Truth("dnat", negated)] if "DNAT" in value.split(",") else []


def _mark_match(value: str, negated: bool) -> list[AnyMatch]:
    mark, slash, mask = value.partition("/")
    return [mark_match(int(mark, 0), int(mask, 0) if slash else _ALL_BITS, negated=negated)]


def _in_set(value: str, negated: bool, sets: Sets) -> list[AnyMatch]:
    name, _, directions = value.partition(" ")
    found = sets.match(name, directions, negated)
    return [found] if found else []


_READERS: dict[str, Callable[[str, bool], list[AnyMatch]]] = {
    "-d": _addresses("address"),
    "--dst-range": _addresses("address"),
    "--dport": _ports("port"),
    "--dports": _ports("port"),
    "-p": _protocol,
    "--dst-type": _local,
    "--ctstate": _dnat,
    "--ctorigdst": _addresses("original_address"),
    "--ctorigdstport": _ports("original_port"),
    "--ctreplsrc": _addresses("reply_address"),
    "--ctreplsrcport": _ports("reply_port"),
    "--mark": _mark_match,
}


def _mark(values: dict[str, str]) -> int:
    """The bits that a MARK or CONNMARK sets; 0 where it only restores or clears."""
    for name in _MARKS:
        if name in values:
            try:
                return int(values[name].partition("/")[0], 0)
            except ValueError:
                return 0
    return 0
