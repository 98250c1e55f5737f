# SPDX-License-Identifier: Apache-2.0
"""Parses the output of iptables-save, and writes what removes kube-proxy's part of it.

Others' rules stay as they are. A chain of kube-proxy that one of them jumps to stays too, but is
flushed. KUBE-MARK-MASQ is not: if others jump to it, it and the chain that masquerades marked
packets keep their rules (CNIs' host ports may need it: portmap's externalSetMarkChain).
"""

import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

from ebpflb.model import kube_proxy
from ebpflb.model.kube_proxy import IPTABLES, MARK_MASQ, POSTROUTING, SETS, TOP_LEVEL_CHAINS

_WORD = re.compile(r'"(?:[^"\\]|\\.)*"|\S+')
# The matches that kube-proxy's rules in the kernel's own chains may have before the jump.
_IN_A_JUMP = re.compile(
    r'(?:-m conntrack --ctstate NEW |-m comment --comment (?:"(?:[^"\\]|\\.)*"|\S+) )*-j \S+'
)


class IptablesRule(NamedTuple):
    """A rule: the chain that it is in, and the rest as iptables-save writes it."""

    chain: str
    text: str

    @property
    def target(self) -> str:
        """The chain or target that it jumps to; "" for none."""
        return _after(self.text, ("-j", "-g"))

    @property
    def set(self) -> str:
        """The first ipset that it matches; "" for none."""
        return _after(self.text, ("--match-set",))

    @property
    def is_bare(self) -> bool:
        """Whether it matches nothing but new connections."""
        return bool(_IN_A_JUMP.fullmatch(self.text))


class IptablesTable(NamedTuple):
    """One table: its chains, each with whether it is the kernel's own, and all rules in order.

    ``policies`` are those of the kernel's own chains: ACCEPT or DROP.
    """

    name: str
    chains: dict[str, bool]
    rules: list[IptablesRule]
    policies: dict[str, str]


def parse(saved: str) -> list[IptablesTable]:
    """The tables of iptables-save, with or without counters."""
    tables: list[IptablesTable] = []
    for line in saved.splitlines():
        match line[:1]:
            case "*":
                tables.append(IptablesTable(line[1:].strip(), {}, [], {}))
            case ":":
                name, policy = line[1:].split()[:2]
                tables[-1].chains[name] = policy != "-"
                tables[-1].policies[name] = policy
            case "-" | "[":
                _, chain, text = line[line.index("-A ") :].split(" ", 2)
                tables[-1].rules.append(IptablesRule(chain, text))
    return tables


class Removal:
    """What is removed from one table. It is false if nothing has to be removed.

    ``deleted_chains`` are deleted, ``flushed_chains`` stay without rules, ``masquerade_chains``
    stay with their rules, because others' rules need them.
    """

    def __init__(self, table: IptablesTable) -> None:
        self.table = table
        known = [name for name in table.chains if kube_proxy.is_chain(name)]
        self.own_chains = set(known) if table.name in IPTABLES else set()
        used = self.references.keys()
        self.masquerade_chains = (
            {MARK_MASQ, POSTROUTING} & self.own_chains if MARK_MASQ in used else set()
        )
        deleted = self.own_chains - used - self.masquerade_chains
        self.deleted_chains = [name for name in known if name in deleted]
        self.flushed_chains = [
            name for name in used if name not in self.masquerade_chains and self._has_rules(name)
        ]

    @cached_property
    def references(self) -> dict[str, list[str]]:
        """kube-proxy's chains that others' rules jump to, each with the chains of these rules."""
        found: dict[str, list[str]] = {}
        for rule in self.table.rules:
            if (
                rule.chain not in self.own_chains
                and rule.target in self.own_chains
                and not self._jump(rule)
            ):
                chains = found.setdefault(rule.target, [])
                if rule.chain not in chains:
                    chains.append(rule.chain)
        return found

    @cached_property
    def deleted_rules(self) -> list[IptablesRule]:
        """Single rules: jumps to deleted chains, and matches of ipsets that will be removed."""
        return [
            rule
            for rule in self.table.rules
            if (self._jump(rule) and rule.target not in self.masquerade_chains)
            or (
                rule.chain in self.masquerade_chains
                and (rule.set in SETS or rule.target in self.deleted_chains)
            )
        ]

    def __bool__(self) -> bool:
        return bool(self.deleted_chains or self.flushed_chains or self.deleted_rules)

    @property
    def summary(self) -> str:
        """How many chains and rules, in words."""
        counts = {
            "chain": len(self.deleted_chains) + len(self.flushed_chains),
            "rule": len(self.deleted_rules),
        }
        return " and ".join(f"{n} {word}{'s' * (n > 1)}" for word, n in counts.items() if n)

    @property
    def retained(self) -> str:
        """The chains that stay, and which rules use them; "" for none."""
        users = dict.fromkeys(chain for chains in self.references.values() for chain in chains)
        names = dict.fromkeys([*self.references, *sorted(self.masquerade_chains)])
        return f"{', '.join(names)}: used by rules in {', '.join(users)}" if names else ""

    @property
    def script(self) -> str:
        """For iptables-restore --noflush, which does all of it or nothing."""
        return "\n".join([f"*{self.table.name}", *self._lines(), "COMMIT", ""])

    def _lines(self) -> Iterator[str]:
        """To name a chain flushes it."""
        yield from (f":{name} - [0:0]" for name in (*self.deleted_chains, *self.flushed_chains))
        yield from (f"-D {rule.chain} {rule.text}" for rule in self.deleted_rules)
        yield from (f"-X {name}" for name in self.deleted_chains)

    def _jump(self, rule: IptablesRule) -> bool:
        """Whether it is kube-proxy's jump from one of the kernel's own chains."""
        own = self.table.chains.get(rule.chain, False)
        return own and rule.target in self.own_chains & TOP_LEVEL_CHAINS and rule.is_bare

    def _has_rules(self, name: str) -> bool:
        return any(rule.chain == name for rule in self.table.rules)


def _after(text: str, options: Iterable[str]) -> str:
    pairs = pairwise(_WORD.findall(text))
    return next((after for word, after in pairs if word in options), "")
