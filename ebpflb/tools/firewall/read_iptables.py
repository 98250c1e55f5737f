# SPDX-License-Identifier: Apache-2.0
"""Read the output of iptables-save (iptables-extensions(8))."""

import re
from collections.abc import Iterator

from ebpflb.model import kube_proxy
from ebpflb.tools.firewall.rules import MANGLE, NAT_DST, RAW, Chain, Option, Rule, Table

_PRIORITIES = {"raw": RAW, "mangle": MANGLE, "nat": NAT_DST}
_BUILT_IN = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")
_LONGEST = 160  # characters shown of a rule's text
_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')


def read(saved: str, tool: str) -> list[Table]:
    """Return the tables. Raises ValueError or LookupError.

    ``tool`` is iptables or ip6tables with its variant, such as "iptables-nft".
    """
    return [_table(found, tool) for found in kube_proxy.parse_rules(saved)]


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


def _table(found: kube_proxy.IptablesTable, tool: str) -> Table:
    table = Table(f"{tool}, table {found.name}", 6 if tool.startswith("ip6") else 4)
    for name in found.chains:
        hook = name.lower() if name in _BUILT_IN else ""
        priority = _PRIORITIES.get(found.name, 0)
        table.chains[name] = Chain(name, hook, priority, found.name == "nat")
    for rule in found.rules:
        shown = rule.text if len(rule.text) <= _LONGEST else f"{rule.text[:_LONGEST]}..."
        table.chains[rule.chain].rules.append(Rule(shown, tuple(map(_option, options(rule.text)))))
    return table


def _option(option: Option) -> Option:
    """An ipset of destinations is not read: the option becomes an unreadable one."""
    name, _, directions = option.value.partition(" ")
    if option.name == "--match-set" and "dst" in directions.split(","):
        return Option("-d", f"ipset {name}")
    return option
