# SPDX-License-Identifier: Apache-2.0
"""Which rules act on each packet of a connection between devices, now and as they change.

With --fast-forward they miss packets of established flows (docs/configuration.md). Left out are
rules after one that takes all established connections, rules for other states, NAT, which only
sees the first packet, and marks: `ip rule` shows those that routes depend on.
"""

import time
from collections.abc import Callable, Collection, Generator, Hashable, Iterator
from typing import NamedTuple

from ebpflb.errors import EbpflbError, in_words
from ebpflb.kernel import netlink
from ebpflb.kernel.netfilter import firewall
from ebpflb.kernel.netfilter.firewall import (
    PRIORITIES,
    STATES,
    UNREAD_RULE,
    Chain,
    Rule,
    Table,
    is_foreign,
    tables,
)
from ebpflb.kernel.node import routes
from ebpflb.model import kube_proxy
from ebpflb.model.nodes import EachPacketRules
from ebpflb.workers import DescriptorWorker

_ON_THE_WAY = ("prerouting", "forward", "postrouting")
_STATE = {"--ctstate", "--state", "state"}
_SILENT = {"-m", "-j", "-g", "--comment", "counter", *_STATE}
_FLAGS = {"--tcp-flags", "--syn", "flags"}
_TAKING = {"ACCEPT", "DROP", "REJECT"}
_EFFECTS = {  # by target or option of iptables, or statement of nft
    "logs": {"LOG", "NFLOG", "ULOG", "log"},
    "changes": {"DSCP", "TOS", "TTL", "HL", "CLASSIFY", "set header"},
    "queues": {"NFQUEUE", "queue"},
    "copies": {"TEE", "dup"},
    "counts": {"--quota", "--connbytes", "quota", "counter"},
    "limits": {"--limit", "--hashlimit-name", "limit"},
}


class Met(NamedTuple):
    """A rule that packets of established connections meet, in a chain of this base chain.

    ``rule``: None for the base chain itself.
    """

    base: Chain
    chain: str
    rule: Rule | None = None

    def changes_with(self, table: Table) -> Hashable:
        """Return what differs when the rule, or the base chain's policy, is another one."""
        rule = self.rule and (self.rule.text, self.rule.options)
        return table.title, self.base.name, self.base.policy, self.chain, rule


def met(table: Table) -> Iterator[Met]:
    """Yield the base chains on the way, and their rules for established connections."""
    taking = dict[str, bool]()
    for base in table.chains.values():
        if base.hook in _ON_THE_WAY and not base.is_nat:
            yield Met(base, base.name)
            for chain, rule in _of_chain(table, base, taking):
                yield Met(base, chain, rule)


def each_packet(table: Table) -> Iterator[str]:
    """Yield a line for each such rule."""
    for base, chain, rule in met(table):
        if rule and (effect := _effect(rule, base.hook)):
            yield f"{table.title}, chain {chain}: {rule.text}: {effect} each packet"


def for_invalid(table: Table) -> Iterator[str]:
    """Yield a line for each rule, of any hook, that asks for packets that conntrack finds invalid,
    also by excluding other states.
    """
    for chain in table.chains.values():
        for rule in chain.rules:
            if UNREAD_RULE in rule.options:
                yield f"{table.title}, chain {chain.name}: {rule.text}: it cannot be read"
            elif "invalid" in _states(rule):
                yield f"{table.title}, chain {chain.name}: {rule.text}: asks for ct state invalid"


def _of_chain(
    table: Table, chain: Chain, taking: dict[str, bool]
) -> Generator[tuple[str, Rule], None, bool]:
    """Yield rules; return whether the chain takes every packet of established connections.

    ``taking`` has the results for earlier chains.
    """
    if chain.name in taking or kube_proxy.is_chain(chain.name):
        return taking.get(chain.name, False)
    taking[chain.name] = False
    for rule in chain.rules:
        states = _states(rule)
        if states and "established" not in states:
            continue
        yield chain.name, rule
        takes = bool(_TAKING & rule.targets)
        for name in rule.targets & table.chains.keys():
            takes = yield from _of_chain(table, table.chains[name], taking)
        if takes and _SILENT.issuperset(rule.names):
            taking[chain.name] = True
            break
    return taking[chain.name]


def _effect(rule: Rule, hook: str) -> str:
    """Return what the rule does; "" for nothing, and for tests for TCP's SYN.

    A packet that FORWARD drops brings no connection into the flowtable; behind FORWARD it is in it.
    """
    if _FLAGS & rule.names:
        return ""
    causes = rule.names | rule.targets
    if hook == "postrouting" and causes & {"DROP", "REJECT"}:
        return "drops"
    return next((effect for effect, found in _EFFECTS.items() if found & causes), "")


def _states(rule: Rule) -> frozenset[str]:
    """Return the connection states that the rule tests for; empty for any."""
    for option in rule.options:
        asked = STATES.intersection(option.value.lower().split(","))
        if option.name in _STATE and asked:
            return STATES - asked if option.negated else asked
    return frozenset()


def marked_routes() -> list[str]:
    """Return a line for each mark that routing rules ask for. Raises NodeError."""
    return [f"ip rule: fwmark {mark:#x}" for mark in sorted(routes.rule_marks())]


_POLL_SECONDS = 0.5  # for tables of iptables-legacy, whose changes cause no message
_GATHER_SECONDS = 0.1  # for the rest of a change
QUIET_SECONDS = 5.0
_AGAIN_SECONDS = 60.0  # for changes that cannot be seen
_CHANGING, _UNREADABLE = "the rules are changing", "the firewall rules cannot be read"

_TABLES_GROUP, _TABLES = 7, 10 << 8  # NFNLGRP_NFTABLES, NFNL_SUBSYS_NFTABLES
# NFT_MSG_NEWTABLE, _DELTABLE, _NEWCHAIN, _DELCHAIN, _NEWRULE, _DELRULE
_ABOUT_RULES = {_TABLES | kind for kind in (0, 2, 3, 5, 6, 8)}
_TABLE_NAME = 1  # NFTA_*_TABLE
_HEADER_SIZE = 4  # struct nfgenmsg
_ROUTING_RULES = 8, 19  # RTNLGRP_IPV4_RULE, RTNLGRP_IPV6_RULE


class EachPacketWatch(DescriptorWorker):
    """Emit these rules at once, and within a second of each change, from a thread.

    The tools read all rules after a change, and every minute. Changes that follow each other within
    QUIET_SECONDS are not read one by one: until they end the rules count as unknown. Rules that
    cannot be read are unknown too, and what is unknown is emitted as if it were such a rule.
    Of iptables-legacy only the sizes of tables are looked at between two readings. With each
    reading that finds other rules for established connections, ``changes`` is another number.
    """

    def __init__(
        self,
        emit: Callable[[EachPacketRules], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("each-packet")
        self._emit, self._clock = emit, clock
        self._told: EachPacketRules | None = None
        self._rules: Hashable = None  # those for established connections, as last read
        self._changes = 0
        self._due = self._quiet_from = clock()
        tables = netlink.Subscription(_TABLES_GROUP, protocol=netlink.NETFILTER)
        self._changed = tables, netlink.Subscription(*_ROUTING_RULES)
        self._sizes = _legacy_sizes()

    def stop(self) -> None:
        super().stop()
        for each in self._changed:
            each.close()

    def run(self) -> None:
        self.look()
        while not self.stopped.is_set():
            self.wait(self._changed, _POLL_SECONDS)
            self.look()

    def look(self) -> None:
        """Note a change; read all rules if that is due."""
        now = self._clock()
        if self._has_changed():
            is_quiet = now >= self._quiet_from
            self._due = now if is_quiet else now + QUIET_SECONDS
            self._quiet_from = now + QUIET_SECONDS
            if not is_quiet:
                self._tell([_CHANGING], _CHANGING)
        if now >= self._due and not self.stopped.is_set():
            self._read()
            self._due = now + _AGAIN_SECONDS

    def _read(self) -> None:
        try:
            lines, rules, invalid = read_rules()
        except Exception:
            self._tell([_UNREADABLE], _UNREADABLE)
            raise
        self._changes += rules != self._rules
        self._rules = rules
        self._tell(lines, invalid)

    def _has_changed(self) -> bool:
        former, self._sizes = self._sizes, _legacy_sizes()
        changed = self._sizes != former or any(
            each.has_news(_is_about_rules) for each in self._changed
        )
        if changed and not self.stopped.wait(_GATHER_SECONDS):
            for each in self._changed:
                each.take()
        return changed

    def _tell(self, rules: Collection[str], invalid: str) -> None:
        found = EachPacketRules(tuple(rules), self._changes, invalid)
        if found != self._told:
            self._told = found
            self._emit(found)


def read_rules() -> tuple[list[str], Hashable, str]:
    """Return a line for each rule, and for what cannot be read; what changes with the rules; and
    the first rule for invalid packets, or what cannot be read.
    """
    unread = list[str]()
    try:
        found = list(tables(unread))
        lines = [line for table in found for line in each_packet(table)]
        rules = frozenset(each.changes_with(table) for table in found for each in met(table))
        invalid = [*(line for table in found for line in for_invalid(table)), *unread, ""]
        return [*dict.fromkeys(lines), *marked_routes(), *unread], rules, invalid[0]
    except (EbpflbError, OSError) as error:
        reason = f"{_UNREADABLE}: {in_words(error)}"
        return [reason], None, reason


def _legacy_sizes() -> list[bytes]:
    """Return the sizes of all tables of iptables-legacy; empty ones if they cannot be read."""
    families = firewall.FAMILY_OF_TOOL.values()
    try:
        return [firewall.legacy_size(family, name) for family in families for name in PRIORITIES]
    except EbpflbError:
        return []


def _is_about_rules(kind: int, content: bytes) -> bool:
    """Whether the message is rtnetlink's, or about another program's nftables rules."""
    if kind < _TABLES:
        return True
    if kind not in _ABOUT_RULES:
        return False
    name = netlink.attributes(content, _HEADER_SIZE).get(_TABLE_NAME, b"")
    return is_foreign(netlink.from_text(name))
