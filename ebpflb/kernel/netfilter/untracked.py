# SPDX-License-Identifier: Apache-2.0
"""Watch which destinations rules in raw exempt from conntrack (model/nodes.py).

The rules are those of iptables' table raw, in both variants, and of chains of nftables in
PREROUTING before conntrack, except ebpflb's. Such a rule counts if it asks for the destination's
address, port or protocol and for nothing else, and if the chains that lead to it do too. A rule
that asks neither for an address nor for a port is about the cost of conntrack, not about a
Service, and does not count.

The rules are read by the tools, and only after a change: of nftables' generation and then of the
handles of these chains' rules, or of the size of a table of iptables-legacy. The elements of named
sets have no handles, so all rules are read again every minute, if there are any.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator
from ipaddress import ip_network
from typing import ClassVar, NamedTuple

from ebpflb.kernel.netfilter import firewall, nft
from ebpflb.kernel.netfilter.firewall import NOT_READ, RAW, Chain, Rule, Table, is_foreign, tables
from ebpflb.model import kube_proxy
from ebpflb.model.addresses import number
from ebpflb.model.facts import Fact, Observed
from ebpflb.model.nodes import Condition, Destination
from ebpflb.model.services import Protocol
from ebpflb.workers import PeriodicWorker

log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 2.0
_AGAIN_SECONDS = 60.0  # for changes that cannot be seen
_PLAIN = frozenset(  # conditions on the destination, and what does not matter
    {"-d", "-p", "-m", "--dport", "--dports", "--comment", "-j", "-g", "--notrack"}
    | {"daddr", "dport", "protocol", "nexthdr", "l4proto", "notrack", "comment", "counter"}
)
_V4 = ip_network("0.0.0.0/0")
_V4_RANGE = ((number(_V4[0]), number(_V4[-1])),)
OF_FAMILY = {
    "ip": (Condition(True, _V4_RANGE, False),),
    "ip6": (Condition(True, _V4_RANGE, True),),
}


class _Way(NamedTuple):
    """The conditions that lead to a chain.

    ``asks``: for an address; ``is_plain``: for the destination and nothing else.
    """

    chain: str
    asks: bool = False
    is_plain: bool = True
    protocols: frozenset[int] = frozenset(map(int, Protocol))
    conditions: tuple[Condition, ...] = ()

    def through(self, rule: Rule) -> "_Way":
        is_plain = self.is_plain and _PLAIN.issuperset(rule.names)
        try:
            found, asks = tuple(rule.conditions), any(it.of_address for it in rule.conditions)
        except ValueError:
            found, asks, is_plain = (), NOT_READ in rule.options, False
        protocols = frozenset(it for it in self.protocols if rule.is_for(it))
        conditions = (*self.conditions, *(it for it in found if it not in self.conditions))
        return _Way(self.chain, self.asks or asks, is_plain, protocols, conditions)


def _ways(
    table: Table, begin: Iterable[Chain], ends: Callable[[Rule], bool]
) -> Iterator[tuple[_Way, Destination]]:
    """Yield the destinations of the rules that end here, each with the way that leads to it.

    Each chain is read once for its conditions, and only if it leads to such a rule: a CNI may have
    one for each pod, with all its policies.
    """
    chains, leading = table.chains.values(), set[str]()
    ending = {it.name for it in chains if any(map(ends, it.rules))}
    while ending - leading:
        leading |= ending
        ending = {it.name for it in chains if any(rule.targets & leading for rule in it.rules)}
    family = OF_FAMILY.get(table.family, ())
    ways = dict.fromkeys(_Way(it.name, conditions=family) for it in begin)
    waiting = list(ways)
    for way in waiting:
        for rule in table.chains[way.chain].rules:
            its = way.through(rule)
            if ends(rule):
                line = f"{table.title}, chain {way.chain}: {rule.text}"
                yield its, Destination(its.protocols, its.conditions, line)
            for name in rule.targets & leading:
                onward = its._replace(chain=name)
                if onward not in ways and not kube_proxy.is_chain(name):
                    ways[onward] = None
                    waiting.append(onward)


def untracked(table: Table) -> Iterator[Destination]:
    """Yield the destinations that a table exempts in PREROUTING."""
    early = (it for it in table.chains.values() if it.priority < nft.CONNTRACK)
    begin = (it for it in early if it.hook == "prerouting")
    for way, found in _ways(table, begin, lambda rule: rule.exempts):
        if way.is_plain and way.conditions != OF_FAMILY.get(table.family, ()):
            yield found


def untracked_now(unread: list[str]) -> frozenset[Destination]:
    """Return the destinations in this network namespace.

    Adds a line to ``unread`` for each tool whose rules exist and cannot be read.
    """
    return frozenset(each for table in tables(unread, RAW) for each in untracked(table))


class UntrackedWatch(PeriodicWorker):
    """Emits the destinations after each change; ``found`` are those before the first.

    Subclasses watch for other rules.
    """

    name, fact = "untracked", Fact.UNTRACKED_DESTINATIONS
    rules, effect = "rules in raw", "may exempt Services from ebpflb"
    legacy: ClassVar[tuple[str, ...]] = ("raw",)  # tables of iptables-legacy

    def __init__(
        self,
        emit: Callable[[Observed], None],
        found: frozenset[Destination] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(self.name, _INTERVAL_SECONDS, failing=self.rules, steady=True)
        self._emit, self._clock = emit, clock
        self._generation: object = None
        self._rules: object = None  # what is known of the rules without reading them
        self._found = found
        self._unread: list[str] = []
        self._again = -math.inf  # when the rules are read again, by the clock

    def tables(self) -> set[nft.Name]:
        """Return the tables of nftables that may have such rules. Raises NodeError."""
        return nft.raw_tables()

    def destinations(self, unread: list[str]) -> frozenset[Destination]:
        """Read the rules; see ``untracked_now``."""
        return untracked_now(unread)

    def turn(self) -> None:
        """Look for a change. Raises NodeError."""
        generation = nft.generation(), self._legacy()
        if generation == self._generation and self._clock() < self._again:
            return
        tables = self.tables()
        rules = tables, nft.rules(tables), generation[1]
        if rules != self._rules or self._clock() >= self._again:
            self._read()
        self._generation, self._rules = generation, rules
        self._again = self._clock() + (_AGAIN_SECONDS if tables or any(rules[2]) else math.inf)

    def _legacy(self) -> list[bytes]:
        tools = firewall.FAMILY_OF_TOOL.values()
        return [firewall.legacy_size(it, name) for it in tools for name in self.legacy]

    def _read(self) -> None:
        unread = list[str]()
        found = self.destinations(unread)
        for line in unread if unread != self._unread else ():
            log.warning("%s, which %s: %s", self.rules, self.effect, line)
        if unread:  # what cannot be read may be as it was
            found |= self._found
        self._unread = unread
        if found != self._found:
            self._found = found
            log.info("%s, which %s: %d destinations", self.rules, self.effect, len(found))
            self._emit(Observed(self.fact, found))


# Watch which destinations rules in PREROUTING and FORWARD drop (model/nodes.py).
#
# A request that is handed to another node by its MAC address passes neither (docs/firewalls.md). A
# rule counts if it, or one that leads to it, asks for a destination; its other conditions, and what
# other rules accept before it, do not matter. A destination that cannot be read may be any of the
# table's family.

_HOOKS, _DROPPING = ("prerouting", "forward"), {"DROP", "REJECT"}


def dropped(table: Table) -> Iterator[Destination]:
    """Yield the destinations that the table drops."""
    begin = (it for it in table.chains.values() if it.hook in _HOOKS)
    for way, found in _ways(table, begin, lambda rule: bool(rule.targets & _DROPPING)):
        if way.asks:
            yield found


def dropped_now(unread: list[str]) -> frozenset[Destination]:
    """Return the destinations in this network namespace; ``unread`` as in ``untracked_now``."""
    return frozenset(each for table in tables(unread) for each in dropped(table))


class DroppedWatch(UntrackedWatch):
    """Emits the destinations after each change, only with --hand-over."""

    name, fact = "dropped", Fact.DROPPED_DESTINATIONS
    rules, effect = "rules that drop requests", "may forbid a hand-over"
    legacy = ("raw", "mangle", "filter")

    def tables(self) -> set[nft.Name]:
        return {it for it in nft.request_tables() if is_foreign(it.table)}

    def destinations(self, unread: list[str]) -> frozenset[Destination]:
        return dropped_now(unread)
