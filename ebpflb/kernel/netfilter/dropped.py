# SPDX-License-Identifier: Apache-2.0
"""Watch which destinations rules in PREROUTING and FORWARD drop (model/nodes.py).

A request that is handed to another node by its MAC address passes neither (docs/firewalls.md). A
rule counts if it, or one that leads to it, asks for a destination; its other conditions, and what
other rules accept before it, do not matter. A destination that cannot be read may be any of the
table's family.
"""

from collections.abc import Iterator
from typing import NamedTuple

from ebpflb.kernel.netfilter import nft
from ebpflb.kernel.netfilter.firewall import NOT_READ, Chain, Rule, Table, is_foreign, tables
from ebpflb.kernel.netfilter.untracked import OF_FAMILY, UntrackedWatch
from ebpflb.model import kube_proxy
from ebpflb.model.facts import Fact
from ebpflb.model.nodes import Condition, Destination, Dropped
from ebpflb.model.services import Protocol

_HOOKS, _DROPPING = ("prerouting", "forward"), {"DROP", "REJECT"}


class _Way(NamedTuple):
    """The conditions that lead to a chain; ``asks``: for an address."""

    chain: str
    asks: bool = False
    protocols: frozenset[int] = frozenset(map(int, Protocol))
    conditions: tuple[Condition, ...] = ()

    def through(self, rule: Rule) -> "_Way":
        try:
            found, asks = tuple(rule.conditions), any(it.of_address for it in rule.conditions)
        except ValueError:
            found, asks = (), NOT_READ in rule.options
        protocols = frozenset(it for it in self.protocols if rule.is_for(it))
        conditions = (*self.conditions, *(it for it in found if it not in self.conditions))
        return _Way(self.chain, self.asks or asks, protocols, conditions)


def dropped(table: Table) -> Iterator[Dropped]:
    """Yield the destinations that the table drops; each chain is read once for its conditions, and
    only if it leads to a rule that drops: a CNI may have one for each pod, with all its policies.
    """
    leading = set[str]()
    while more := {
        it.name for it in table.chains.values() if it.name not in leading and _leads(it, leading)
    }:
        leading |= more
    family = OF_FAMILY.get(table.family, ())
    begin = (_Way(it.name, conditions=family) for it in table.chains.values() if it.hook in _HOOKS)
    ways = dict.fromkeys(begin)
    waiting = list(ways)
    for way in waiting:
        for rule in table.chains[way.chain].rules:
            its = way.through(rule)
            if its.asks and rule.targets & _DROPPING:
                line = f"{table.title}, chain {way.chain}: {rule.text}"
                yield Dropped(Destination(its.protocols, its.conditions), line)
            for name in rule.targets & leading:
                onward = its._replace(chain=name)
                if onward not in ways and not kube_proxy.is_chain(name):
                    ways[onward] = None
                    waiting.append(onward)


def _leads(chain: Chain, leading: set[str]) -> bool:
    return any(rule.targets & (_DROPPING | leading) for rule in chain.rules)


def dropped_now(unread: list[str]) -> frozenset[Dropped]:
    """Return the destinations in this network namespace; ``unread`` as in ``untracked``."""
    return frozenset(each for table in tables(unread) for each in dropped(table))


class DroppedWatch(UntrackedWatch):
    """Emits the destinations after each change, only with --hand-over."""

    name, fact = "dropped", Fact.DROPPED_DESTINATIONS
    rules, effect = "rules that drop requests", "may forbid a hand-over"
    legacy = ("raw", "mangle", "filter")

    def tables(self) -> set[nft.Name]:
        return {it for it in nft.request_tables() if is_foreign(it.table)}

    def destinations(self, unread: list[str]) -> frozenset[Dropped]:
        return dropped_now(unread)
