# SPDX-License-Identifier: Apache-2.0
"""Read the output of iptables-save (iptables-extensions(8)), and ipsets that rules match."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import chain
from typing import NamedTuple

from ebpflb.model import kube_proxy
from ebpflb.tools.firewall.rules import MANGLE, NAT_DST, RAW, Chain, Option, Rule, Table

_PRIORITIES = {"raw": RAW, "mangle": MANGLE, "nat": NAT_DST}
_BUILT_IN = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")
_LONGEST = 160  # characters shown of a rule's text
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')
_DIMENSIONS = {"ip": "-d", "net": "-d", "port": "--dports"}

_OfSet = Callable[[Option], list[Option]]


class Ipset(NamedTuple):
    """``kinds`` has one word for each dimension: ip, net, port; ``members`` as in `ipset save`."""

    kinds: list[str]
    members: list[list[str]]


def read(saved: str, tool: str, ipsets: Mapping[str, Ipset]) -> list[Table]:
    """Return the tables. Raises ValueError or LookupError.

    ``tool`` is iptables or ip6tables with its variant, such as "iptables-nft".
    """
    of_set = cache(lambda option: list(_of_ipset(option, ipsets)))
    return [_table(found, tool, of_set) for found in kube_proxy.parse_rules(saved)]


def read_ipsets(saved: str) -> dict[str, Ipset]:
    """Parse the output of `ipset save`, without members that are exceptions ("nomatch")."""
    found: dict[str, Ipset] = {}
    for line in saved.splitlines():
        command, name, rest, *flags = [*line.split(" "), "", ""]
        if command == "create":
            found[name] = Ipset(rest.partition(":")[2].split(","), [])
        elif command == "add" and name in found and "nomatch" not in flags:
            found[name].members.append(rest.split(","))
    return found


def options(text: str) -> Iterator[Option]:
    """Yield each option with the words that follow it; negated if a "!" precedes it."""
    found: list[tuple[str, list[str], bool]] = []
    negated = False
    for word in _WORD.findall(text):
        if word == "!":
            negated = True
        elif word.startswith("-") and not word[1:2].isdigit():
            found.append((word, [], negated))
            negated = False
        elif found:
            found[-1][1].append(word)
    return (Option(name, " ".join(words), is_negated) for name, words, is_negated in found)


def _table(found: kube_proxy.IptablesTable, tool: str, of_set: _OfSet) -> Table:
    table = Table(f"{tool}, table {found.name}", 6 if tool.startswith("ip6") else 4)
    for name in found.chains:
        hook = name.lower() if name in _BUILT_IN else ""
        priority = _PRIORITIES.get(found.name, 0)
        table.chains[name] = Chain(name, hook, priority, found.name == "nat")
    for rule in found.rules:
        shown = rule.text if len(rule.text) <= _LONGEST else f"{rule.text[:_LONGEST]}..."
        asked = (of_set(it) if it.name == "--match-set" else [it] for it in options(rule.text))
        table.chains[rule.chain].rules.append(Rule(shown, tuple(chain.from_iterable(asked))))
    return table


def _of_ipset(option: Option, ipsets: Mapping[str, Ipset]) -> Iterator[Option]:
    """Yield the destinations of a set's members; for an unknown set an unreadable option."""
    name, _, directions = option.value.partition(" ")
    if "dst" not in directions.split(","):
        yield option
        return
    kinds, members = ipsets.get(name, Ipset([], []))
    asked = zip(kinds, directions.split(","), strict=False)
    wanted = [at for at, (kind, way) in enumerate(asked) if way == "dst" and kind in _DIMENSIONS]
    if not wanted:
        yield Option("-d", f"ipset {name}")
    for at in wanted:
        parts = {member[at] for member in members}
        if kinds[at] == "port":
            parts = {part.rpartition(":")[2] for part in parts}  # without the protocol
        yield Option(_DIMENSIONS[kinds[at]], ",".join(parts), option.negated)
