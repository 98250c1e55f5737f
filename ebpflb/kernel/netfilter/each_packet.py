# SPDX-License-Identifier: Apache-2.0
"""Which rules act on each packet of a connection between devices, now and as they change.

With --fast-forward they miss packets of established flows (docs/configuration.md). Left out are
rules after one that takes all established connections, rules for other states, NAT, which only
sees the first packet, and marks: `ip rule` shows those that routes depend on.
"""

import struct
import time
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

from ebpflb.errors import EbpflbError, in_words
from ebpflb.kernel import netlink
from ebpflb.kernel.netfilter import firewall
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
from ebpflb.kernel.netlink import attributes
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
        others = netlink.Subscription(*(GROUPS if looks_at_ways else ()))
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


# Whether the way of a connection in the flowtable may have become another one. If the way leads
# over a bridge or a VLAN, the kernel keeps its device, its MAC addresses and its MTU as they were
# when the connection entered the flowtable, and asks for no route any more. (Elsewhere it asks
# whether the route is still valid, and for the neighbour.)

# RTNLGRP_LINK, _NEIGH, _IPV4_ROUTE, _IPV6_ROUTE
GROUPS = 1, 3, 7, 11
_LINK, _NEIGHBOUR, _ROUTES = 16, 28, (24, 25)  # RTM_NEWLINK, _NEWNEIGH, _NEWROUTE, _DELROUTE
_GET_LINKS, _GET_NEIGHBOURS = 18, 30  # RTM_GETLINK, _GETNEIGH
_IFINFO = struct.Struct("=BxHiII")  # struct ifinfomsg
_NDMSG = struct.Struct("=BxxxiHBB")  # struct ndmsg
_RTMSG = struct.Struct("=BBBBBBBBI")  # struct rtmsg
_ADDRESS, _MTU, _MASTER, _KINDS = 1, 4, 10, 18  # IFLA_*, _LINKINFO
_KIND, _PORT_OF = 1, 4  # IFLA_INFO_KIND, _SLAVE_KIND
_KEEPING = {b"vlan", b"ppp", b"dsa"}  # links whose ways the kernel keeps, as with bridge ports
_UP = 1  # IFF_UP: the kernel itself ends the offloads of a device that is down
_BRIDGE = 7  # AF_BRIDGE: an entry of a bridge's table
_DESTINATION, _LINK_ADDRESS, _VLAN = 1, 2, 5  # NDA_*; RTA_DST is 1 too
_LINK_LOCAL = b"\xfe\x80"
_ROUTED = 1, 6, 7, 8  # RTN_UNICAST, _BLACKHOLE, _UNREACHABLE, _PROHIBIT
_CLONED = 0x200  # RTM_F_CLONED
_MOST = 1 << 16  # neighbours: what fills them is forgotten


class Ways:
    """What is known of links and neighbours; a new one is no change, while all are known
    (``knows_all``). Before a link leads over a bridge or a VLAN, only links change a way.
    """

    def __init__(self) -> None:
        self._known = dict[object, object]()
        self.knows_all, self._keeps_any = True, False
        try:
            for content in netlink.dump(_GET_LINKS, _IFINFO.pack(0, 0, 0, 0, 0)):
                self.changes(_LINK, content)
            for family in (0, _BRIDGE):
                for content in netlink.dump(_GET_NEIGHBOURS, _NDMSG.pack(family, 0, 0, 0, 0)):
                    self.changes(_NEIGHBOUR, content)
        except OSError:
            self.forget()

    def forget(self) -> None:
        """Note that messages are lost, or too many: anything may be as it was not before."""
        self._known.clear()
        self.knows_all = False

    def changes(self, kind: int, content: bytes) -> bool:
        """Whether this message of rtnetlink says that something is as it was not before."""
        if kind == _LINK:
            return self._link_changes(content)
        if kind == _NEIGHBOUR:
            return self._differs(*_neighbour(content)) and self._keeps_any
        if kind not in _ROUTES or not self._keeps_any:
            return False
        *_, type_, flags = _RTMSG.unpack_from(content)
        to = attributes(content, _RTMSG.size).get(_DESTINATION, b"")
        is_usual = flags & _CLONED or to.startswith(_LINK_LOCAL)  # each device has the latter
        return type_ in _ROUTED and not is_usual

    def _link_changes(self, content: bytes) -> bool:
        family, _, index, flags, _ = _IFINFO.unpack_from(content)
        if family or not flags & _UP:  # of a family: a bridge tells of its port again, with less
            return False
        found = attributes(content, _IFINFO.size)
        kinds = attributes(found.get(_KINDS, b""))
        kind, port_of = (kinds.get(it, b"").rstrip(b"\0") for it in (_KIND, _PORT_OF))
        self._keeps_any |= kind in _KEEPING or port_of == b"bridge"
        return self._differs(index, tuple(found.get(it) for it in (_ADDRESS, _MTU, _MASTER)))

    def _differs(self, key: object, value: object) -> bool:
        """Whether the value is another one than before. None as value says nothing."""
        if value is None:
            return False
        if len(self._known) >= _MOST:
            self.forget()
        former = self._known.get(key)
        self._known[key] = value
        return not self.knows_all if former is None else former != value


def _neighbour(content: bytes) -> tuple[object, object]:
    family, index, *_ = _NDMSG.unpack_from(content)
    found = attributes(content, _NDMSG.size)
    if family == _BRIDGE:
        return (family, found.get(_LINK_ADDRESS), found.get(_VLAN)), index
    return (family, index, found.get(_DESTINATION)), found.get(_LINK_ADDRESS)
