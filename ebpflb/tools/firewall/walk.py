# SPDX-License-Identifier: Apache-2.0
"""What the rules of a hook do with a packet: all rules that it reaches, in order.

A rule may test something unknown about the packet: marks, sets, rates, the client's address. Such a
rule may match or not, so there may be several results.
"""

from enum import Enum, auto
from typing import NamedTuple

from msgspec import Struct

from ebpflb.kernel.netfilter.firewall import Chain, Rule, Table
from ebpflb.model import kube_proxy
from ebpflb.model.addresses import Address, number, parse_network
from ebpflb.model.kube_proxy import Option
from ebpflb.model.services import Protocol

_SILENT = {  # matched already, or no condition
    *("-d", "--dst-range", "daddr", "--dport", "--dports", "dport"),
    *("-p", "protocol", "nexthdr", "l4proto", "--syn"),
    *("-j", "-g", "-m", "--comment", "--reject-with", "--log-prefix", "--log-level"),
    *("comment", "counter", "log", "return", "queue"),
}
_KUBE_MARK = "0x4000/0x4000"
_TAKING = {"ACCEPT", "QUEUE", "NFQUEUE", "queue"}  # a program that is asked may accept
DROPPING = {"DROP", "REJECT"}
_RETURNING = {"RETURN", "return"}


class Way(NamedTuple):
    """How requests from clients outside come to this node.

    ``near`` has the node's addresses at ``device``; ``inside`` has those at its other devices: no
    client outside is in a network that contains one of them.
    """

    device: str
    near: frozenset[Address]
    inside: frozenset[Address]


class Packet(Struct, frozen=True):
    """The first packet of a connection from a client outside.

    ``leaves``: the device by which it leaves; "" before routing. ``marked``: with the mark that
    kube-proxy's chains test; ``dnat``: conntrack has translated it.
    """

    address: Address
    port: int
    way: Way
    leaves: str = ""
    marked: bool = True
    dnat: bool = True
    protocol: int = Protocol.TCP


class Fate(Enum):
    ACCEPT = auto()
    DROP = auto()
    DROP_OF_ONE = auto()  # by a rule for this destination alone, as network policies have them
    NEXT = auto()  # no rule of the chain decides


Fates = dict[Fate, Rule | None]
"""What may become of a packet, each with the first rule for it; None: the chain's policy."""


def fates(table: Table, chain: Chain, packet: Packet, *, with_kube_proxy: bool = False) -> Fates:
    """Return the packet's possible fates at a base chain; kube-proxy's chains count on request.

    A rule that cannot be read may match.
    """
    found = _Walk(table, packet, with_kube_proxy=with_kube_proxy).chain(chain.name)
    if Fate.NEXT in found:
        del found[Fate.NEXT]
        found.setdefault(Fate.DROP if chain.policy == "DROP" else Fate.ACCEPT, None)
    return found


def may_drop(table: Table, chain: Chain) -> bool:
    """Whether the chain, or a chain that it leads to, drops anything."""
    rules = (rule for _, rule in table.reached_from(chain))
    return chain.policy == "DROP" or any(DROPPING & rule.targets for rule in rules)


class _Walk:
    """One packet's walk. A chain's result does not depend on the rule that jumps to it."""

    def __init__(self, table: Table, packet: Packet, *, with_kube_proxy: bool) -> None:
        self._table, self._packet, self._with_kube_proxy = table, packet, with_kube_proxy
        self._known: dict[str, Fates] = {}

    def chain(self, name: str) -> Fates:
        if name not in self._known:
            self._known[name] = {Fate.NEXT: None}  # a loop, which netfilter refuses
            self._known[name] = self._of_rules(self._table.chains[name].rules)
        return dict(self._known[name])

    def _of_rules(self, rules: list[Rule]) -> Fates:
        found: Fates = {}
        for rule in rules:
            match = matches(rule, self._packet)
            if match is False:
                continue
            of_rule, goes_on = self._of_rule(rule)
            for fate, by in of_rule.items():
                found.setdefault(fate, by)
            if match and not goes_on:
                return found
        found.setdefault(Fate.NEXT, None)
        return found

    def _of_rule(self, rule: Rule) -> tuple[Fates, bool]:
        """Return the fates after a matching rule, and whether the packet may go on to the next
        rule.
        """
        actions = rule.targets | rule.names
        if actions & _TAKING:
            return {Fate.ACCEPT: rule}, False
        if actions & DROPPING:
            one = is_about_one(rule, self._packet.address)
            return {Fate.DROP_OF_ONE if one else Fate.DROP: rule}, False
        if actions & _RETURNING:
            return {Fate.NEXT: rule}, False
        for target in rule.targets & self._table.chains.keys():
            if self._with_kube_proxy or not kube_proxy.is_chain(target):
                return self._of_jump(rule, self.chain(target))
        return {}, True

    def _of_jump(self, rule: Rule, found: Fates) -> tuple[Fates, bool]:
        """Return the fates after a jump, which may return, or a goto, which does not."""
        comes_back = Fate.NEXT in found and "-g" not in rule.names
        if comes_back:
            del found[Fate.NEXT]
        if Fate.DROP in found and is_about_one(rule, self._packet.address):
            found[Fate.DROP_OF_ONE] = found.pop(Fate.DROP)
        return found, comes_back


def is_about_one(rule: Rule, address: Address) -> bool:
    """Whether the rule names this destination by its address, not by a network."""
    try:
        alone = number(address), number(address)
        return any(alone in each.ranges for each in rule.conditions if not each.negated)
    except ValueError:
        return False


def matches(rule: Rule, packet: Packet) -> bool | None:
    """Whether the rule matches the packet; None if unknown."""
    try:
        hold = [_holds(option, packet) for option in rule.options]
        if rule.asks_for_original:
            hold.append(None)
        else:
            hold.append(rule.matches(packet.protocol, number(packet.address), packet.port))
    except ValueError:
        return None
    return False if False in hold else None if None in hold else True


def _holds(option: Option, packet: Packet) -> bool | None:
    """Whether a condition that is not about the destination holds. Raises ValueError."""
    if option.name in _SILENT:
        return True
    holds = _holds_if_not_negated(option.name, option.value, packet)
    return holds if holds is None else holds != option.negated


def _holds_if_not_negated(name: str, value: str, packet: Packet) -> bool | None:
    values = value.split(",")
    match name:
        case "-s" | "saddr":
            return _any([_is_client(each, packet) for each in values])
        case "-i" | "iif" | "iifname":
            return any(_is_device(packet.way.device, each) for each in values)
        case "-o" | "oif" | "oifname":
            return any(_is_device(packet.leaves, each) for each in values)
        case "--mark" if value == _KUBE_MARK:
            return packet.marked
        case "--ctstate" | "--state" | "state" | "--ctstatus" | "status":
            states = {each.upper() for each in values}
            return "NEW" in states or ("DNAT" in states and packet.dnat)
        case "nfproto":
            return f"ipv{packet.address.version}" in values
    return None


def _is_client(network: str, packet: Packet) -> bool | None:
    """Whether the client is in this network; None if this is unknown. Raises ValueError."""
    parsed = parse_network(network)
    if parsed.version != packet.address.version:
        return False
    if not parsed.prefixlen:
        return True
    is_inside = any(address in parsed for address in (*packet.way.inside, packet.address))
    has_clients = not is_inside or any(address in parsed for address in packet.way.near)
    return None if has_clients else False


def _any(hold: list[bool | None]) -> bool | None:
    return True if True in hold else None if None in hold else False


def _is_device(name: str, pattern: str) -> bool:
    return name.startswith(pattern[:-1]) if pattern[-1:] in ("+", "*") else name == pattern
