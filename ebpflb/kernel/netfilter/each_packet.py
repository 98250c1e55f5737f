# SPDX-License-Identifier: Apache-2.0
"""Which rules act on each packet of a connection between devices, now and as they change.

With --fast-forward they miss packets of established flows (docs/configuration.md). Left out are
rules after one that takes all established connections, rules for other states, NAT, which only
sees the first packet, and marks: `ip rule` shows those that routes depend on.
"""

import time
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

from ebpflb.errors import EbpflbError, in_words
from ebpflb.kernel import netlink
from ebpflb.kernel.netfilter import firewall, ways
from ebpflb.kernel.netfilter.firewall import (
    NOT_READ,
    PRIORITIES,
    STATES,
    UNREAD_RULE,
    Chain,
    Rule,
    Table,
    is_foreign,
    tables,
)
from ebpflb.kernel.netfilter.ways import Ways
from ebpflb.kernel.node import routes
from ebpflb.model import kube_proxy
from ebpflb.model.nodes import EachPacketRules
from ebpflb.model.services import Protocol
from ebpflb.workers import DescriptorWorker

_ON_THE_WAY = ("prerouting", "forward", "postrouting")
_STATE = {"--ctstate", "--state", "state"}
_SILENT = {"-m", "-j", "-g", "--comment", "counter", *_STATE}
_FLAGS = {"--tcp-flags", "--syn", "flags"}
_DROPPING = {"DROP", "REJECT"}
_TAKING = {"ACCEPT", *_DROPPING}
_QUEUES = {"NFQUEUE", "queue"}
_EFFECTS = {  # by target or option of iptables, or statement of nft
    "logs": {"LOG", "NFLOG", "ULOG", "log"},
    "changes": {"DSCP", "TOS", "TTL", "HL", "CLASSIFY", "set header"},
    "copies": {"TEE", "dup"},
    "counts": {"--quota", "--connbytes", "quota", "counter"},
    "limits": {"--limit", "--hashlimit-name", "limit"},
}
_FORWARDED = (Protocol.TCP, Protocol.UDP)  # by the flowtable


def each_packet(table: Table) -> Iterator[str]:
    """Yield a line for each rule that packets of established connections should not bypass: it acts
    on each of them, can drop a later one, or cannot be read. Rules that queue count wherever they
    are: a policy in a program may be another one later, for open connections too.
    """
    for base in table.chains.values():
        if _is_on_the_way(base):
            for chain, each in table.reached_from(base):
                if _QUEUES & (each.names | each.targets):
                    yield _line(table, chain, f"{each.text}: queues packets")
            for chain, rule in met(table, base):
                if not rule:
                    yield _line(table, chain, "its policy drops what no rule accepts")
                elif effect := _effect(rule):
                    yield _line(table, chain, f"{rule.text}: {effect}")


def _line(table: Table, chain: str, said: str) -> str:
    return f"{table.title}, chain {chain}: {said}"


def _is_on_the_way(base: Chain) -> bool:
    """Whether packets pass the chain, and bypass it in the flowtable, whose own priority is 0."""
    is_early = base.hook == "ingress" and base.priority < 0
    return not (base.is_nat or is_early) and base.hook in (*_ON_THE_WAY, "ingress")


def met(table: Table, base: Chain) -> Iterator[tuple[str, Rule | None]]:
    """Yield the rules for established connections, each with its chain's name; None for the policy,
    if it drops.
    """
    takes = yield from _of_chain(table, base, {})
    if base.policy == "DROP" and not takes:
        yield base.name, None


def for_invalid(table: Table) -> Iterator[str]:
    """Yield a line for each rule, of any hook, that asks for packets that conntrack finds invalid,
    also by excluding other states.
    """
    for chain in table.chains.values():
        for rule in chain.rules:
            if UNREAD_RULE in rule.options:
                yield _line(table, chain.name, f"{rule.text}: it cannot be read")
            elif "invalid" in _states(rule):
                yield _line(table, chain.name, f"{rule.text}: asks for ct state invalid")


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
        if (states and "established" not in states) or not any(map(rule.is_for, _FORWARDED)):
            continue
        yield chain.name, rule
        takes = bool(_TAKING & rule.targets)
        for name in rule.targets & table.chains.keys():
            takes = yield from _of_chain(table, table.chains[name], taking)
        if takes and _SILENT.issuperset(rule.names):
            taking[chain.name] = True
            break
    return taking[chain.name]


def _effect(rule: Rule) -> str:
    """Return what the rule does; "" for nothing, and for other tests for TCP's SYN."""
    if UNREAD_RULE in rule.options:
        return "it cannot be read"
    causes = rule.names | rule.targets
    if _DROPPING & causes:
        return "can drop packets of open connections"
    if NOT_READ in rule.options or "--match-set" in rule.names:
        return "asks an ipset, whose changes cannot be seen"
    if _FLAGS & rule.names:
        return ""
    found = (f"{effect} each packet" for effect, kinds in _EFFECTS.items() if kinds & causes)
    return next(found, "")


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
_OF_RULE = {_TABLES | kind for kind in (6, 8)}
_OF_ELEMENTS = {_TABLES | kind for kind in (12, 14)}  # NFT_MSG_NEWSETELEM, _DELSETELEM
_TABLE_NAME, _NAME = 1, 2  # NFTA_*_TABLE; NFTA_RULE_CHAIN, NFTA_SET_ELEM_LIST_SET
_HEADER_SIZE = 4  # struct nfgenmsg
_ROUTING_RULES = 8, 19  # RTNLGRP_IPV4_RULE, RTNLGRP_IPV6_RULE
_OF_ROUTING_RULE = 32, 33  # RTM_NEWRULE, RTM_DELRULE
_BETWEEN_SECONDS = 1.0  # at least, from one change of the ways to the next one that counts

_Name = tuple[str, str]  # of a table, and of a chain or set in it


class Read(NamedTuple):
    """All rules, as far as they matter here.

    ``lines`` is for each rule that a flowtable should not bypass, and for what cannot be read,
    ``invalid`` the first rule for invalid packets, or what cannot be read. ``sets`` are used by
    rules for established connections; in the chains ``elsewhere`` there are no such rules.
    """

    lines: tuple[str, ...]
    invalid: str = ""
    sets: frozenset[_Name] = frozenset()
    elsewhere: frozenset[_Name] = frozenset()


class EachPacketWatch(DescriptorWorker):
    """Emit these rules at once, and within a second of each change, from a thread.

    The tools read all rules after a change, and every minute. Changes that follow each other within
    QUIET_SECONDS are not read one by one: until they end the rules count as unknown. Rules that
    cannot be read are unknown too, and what is unknown is emitted as if it were such a rule.
    The tables of iptables-legacy are compared twice a second, those of more than 64 KiB by size.
    ``changes`` is another number at once, before the rules are read, if connections may be in the
    flowtable then; not for chains that open connections did not meet at the last reading. It is
    another one too, at most once a second, when the ways of open connections may have changed, if
    it ``looks_at_ways``.
    """

    def __init__(
        self,
        emit: Callable[[EachPacketRules], None],
        clock: Callable[[], float] = time.monotonic,
        *,
        looks_at_ways: bool = True,
    ) -> None:
        super().__init__("each-packet")
        self._emit, self._clock = emit, clock
        self._told: EachPacketRules | None = None
        self._found = Read(())
        self._changes = 0
        self._due = self._quiet_from = clock()
        tables = netlink.Subscription(_TABLES_GROUP, protocol=netlink.NETFILTER)
        routing = netlink.Subscription(*_ROUTING_RULES)
        others = netlink.Subscription(*(ways.GROUPS if looks_at_ways else ()))
        self._changed = tables, routing, others
        self._ways = Ways()
        self._others_ways, self._quiet_ways_from = False, clock()
        self._legacy = _legacy()

    def stop(self) -> None:
        super().stop()
        for each in self._changed:
            each.close()

    def run(self) -> None:
        self.look()
        while not self.stopped.is_set():
            self.wait(self._changed, _POLL_SECONDS)
            self.look()
            self.stopped.wait(_GATHER_SECONDS)  # a pod can cause any number of messages

    def look(self) -> None:
        """Note a change; read all rules if that is due."""
        now = self._clock()
        has_changed = self._has_changed()
        if self._others_ways and now >= self._quiet_ways_from:
            self._others_ways, self._quiet_ways_from = False, now + _BETWEEN_SECONDS
            self._count_change()
        if has_changed:
            is_quiet = now >= self._quiet_from
            self._due = now if is_quiet else now + QUIET_SECONDS
            self._quiet_from = now + QUIET_SECONDS
            if not is_quiet:
                self._found = self._found._replace(lines=(_CHANGING,), invalid=_CHANGING)
                self._tell()
        if now >= self._due and not self.stopped.is_set():
            self._read()
            self._due = now + _AGAIN_SECONDS
            if not self._ways.knows_all:
                self._ways, self._others_ways = Ways(), True

    def _read(self) -> None:
        try:
            self._found = read_rules()
        except Exception:
            self._found = Read((_UNREADABLE,), _UNREADABLE)
            raise
        finally:
            self._tell()

    def _has_changed(self) -> bool:
        former, self._legacy = self._legacy, _legacy()
        news = [True] * (self._legacy != former) + self._news()
        if any(news):
            self._count_change()
        if news and not self.stopped.wait(_GATHER_SECONDS):
            self._changes += any(self._news())
        return bool(news)

    def _count_change(self) -> None:
        if not self._found.lines:
            self._changes += 1
            self._tell()

    def _news(self) -> list[bool]:
        """Take the messages; return for each about rules whether open connections may meet it."""
        *taken, others = [each.take() for each in self._changed]
        for message in others or ():
            self._others_ways |= self._ways.changes(*message)
        if others is None:
            self._others_ways = True
            self._ways.forget()
        found = (self._is_met(*it) for messages in taken for it in messages or ())
        lost = [True for messages in taken if messages is None]
        return [it for it in found if it is not None] + lost

    def _is_met(self, kind: int, content: bytes) -> bool | None:
        """Whether open connections may meet what a message is about; None if it is about no rule.

        It is about routing, or about nftables rules of another program.
        """
        if kind < _TABLES:
            return False if kind in _OF_ROUTING_RULE else None
        if kind not in _ABOUT_RULES | _OF_ELEMENTS:
            return None
        found = netlink.attributes(content, _HEADER_SIZE)
        table, name = (netlink.from_text(found.get(at, b"")) for at in (_TABLE_NAME, _NAME))
        if not is_foreign(table):
            return None
        if kind in _OF_ELEMENTS:
            return (table, name) in self._found.sets or None
        return kind not in _OF_RULE or (table, name) not in self._found.elsewhere

    def _tell(self) -> None:
        found = EachPacketRules(self._found.lines, self._changes, self._found.invalid)
        if found != self._told:
            self._told = found
            self._emit(found)


def read_rules() -> Read:
    """Read all rules in this network namespace."""
    unread = list[str]()
    try:
        found = list(tables(unread))
        lines = [line for table in found for line in each_packet(table)]
        invalid = [*(line for table in found for line in for_invalid(table)), *unread, ""]
        lines = [*dict.fromkeys(lines), *marked_routes(), *unread]
    except (EbpflbError, OSError) as error:
        reason = f"{_UNREADABLE}: {in_words(error)}"
        return Read((reason,), reason)
    sets, inside, outside = set[_Name](), set[_Name](), set[_Name]()
    for table in found:
        bases = [base for base in table.chains.values() if _is_on_the_way(base)]
        for base in bases:
            inside |= {(table.name, chain) for chain, _ in table.reached_from(base)}
            rules = (rule for _, rule in met(table, base) if rule)
            sets |= {(table.name, name) for rule in rules for name in rule.sets}
        inside |= {(table.name, base.name) for base in bases}
        outside |= {(table.name, chain) for chain in table.chains}
    return Read(tuple(lines), invalid[0], frozenset(sets), frozenset(outside - inside))


def _legacy() -> list[bytes]:
    """Return all tables of iptables-legacy; none if they cannot be read."""
    families = firewall.FAMILY_OF_TOOL.values()
    try:
        return [firewall.legacy_rules(family, name) for family in families for name in PRIORITIES]
    except EbpflbError:
        return []
