# SPDX-License-Identifier: Apache-2.0
"""Tables, chains and rules of netfilter in the words of iptables-save, whichever tool printed them.

Addresses are numbers of 128 bits, IPv4 as v4-mapped IPv6.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property, lru_cache
from ipaddress import IPv4Address, IPv4Network
from typing import NamedTuple

from msgspec import Struct

from ebpflb.model import kube_proxy
from ebpflb.model.addresses import Address, parse_address, parse_network
from ebpflb.model.kube_proxy import Option, read_options
from ebpflb.model.services import Protocol

# Priorities of netfilter's hooks (uapi/linux/netfilter_ipv4.h).
RAW, MANGLE, NAT_DST = -300, -150, -100
_V4 = 0xFFFF << 32
_ORIGINAL = "--ctorig"
_ADDRESSES = {"-d", "--dst-range", f"{_ORIGINAL}dst"}
_PORTS = {"--dport", "--dports", f"{_ORIGINAL}dstport"}


class Condition(NamedTuple):
    """What a rule asks of the destination: its address, or its port."""

    of_address: bool
    ranges: "Ranges"
    negated: bool


class Rule(Struct, frozen=True, dict=True):
    """A rule; ``text`` shows it to the operator."""

    text: str
    options: tuple[Option, ...]

    @cached_property
    def targets(self) -> set[str]:
        """The actions, and the chains that the rule jumps to."""
        return {option.value for option in self.options if option.name in ("-j", "-g")}

    @cached_property
    def conditions(self) -> list[Condition]:
        """The conditions on the destination. Raises ValueError if one cannot be read."""
        return [
            Condition(is_address, (addresses if is_address else ports)(it.value), it.negated)
            for it in self.options
            if (is_address := it.name in _ADDRESSES) or it.name in _PORTS
        ]

    @property
    def asks_for_original(self) -> bool:
        """Whether the rule asks for the destination before NAT, which conntrack knows."""
        return any(option.name.startswith(_ORIGINAL) for option in self.options)

    def matches(self, protocol: int, address: int, port: int) -> bool:
        """Whether the rule matches this destination; its other conditions are not considered."""
        return all(
            ((address if it.of_address else port) in it.ranges) != it.negated
            for it in self.conditions
        ) and all(
            _is_protocol(it.value, protocol) != it.negated for it in self.options if it.name == "-p"
        )


def _is_protocol(value: str, protocol: int) -> bool:
    names = {"all", str(protocol), Protocol(protocol).name.lower()}
    return not names.isdisjoint(value.split(","))


class Chain(Struct):
    """``hook`` is netfilter's name in lower case, "" for a chain that only other chains jump to."""

    name: str
    hook: str = ""
    priority: int = 0
    is_nat: bool = False
    rules: list[Rule] = []


class Table(Struct):
    """``title`` names the table: "table inet filter", "iptables-legacy, table nat".

    ``family`` is 4 or 6 if the table has packets of one family only, else 0.
    """

    title: str
    family: int = 0
    chains: dict[str, Chain] = {}

    def reached_from(self, chain: Chain) -> Iterator[tuple[str, Rule]]:
        """Yield the rules of a chain and of those that it leads to, each with its chain's name.

        kube-proxy's chains are left out.
        """
        names = {chain.name: None}
        waiting = [chain]
        for at in waiting:
            for rule in at.rules:
                yield at.name, rule
                for name in rule.targets & self.chains.keys() - names.keys():
                    names[name] = None
                    waiting += [] if kube_proxy.is_chain(name) else [self.chains[name]]


class Ranges:
    """A set of numbers, by the first and last of each range."""

    def __init__(self, pairs: Iterable[tuple[int, int]]) -> None:
        self.pairs: list[tuple[int, int]] = []
        for first, last in sorted(pairs):
            if self.pairs and first <= self.pairs[-1][1] + 1:
                first, end = self.pairs.pop()
                last = max(last, end)
            self.pairs.append((first, last))
        self._firsts = [first for first, _ in self.pairs]

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._firsts, number) - 1
        return at >= 0 and number <= self.pairs[at][1]


@lru_cache(maxsize=1024)
def addresses(value: str) -> Ranges:
    """Parse addresses, ADDRESS/LENGTH and FIRST-LAST, separated by commas. Raises ValueError."""
    return Ranges(map(_address_range, filter(None, value.split(","))))


@lru_cache(maxsize=1024)
def ports(value: str) -> Ranges:
    """Parse N, N:M and N-M, separated by commas. Raises ValueError."""
    return Ranges(map(_port_range, filter(None, value.split(","))))


def number(address: Address) -> int:
    return _V4 | int(address) if isinstance(address, IPv4Address) else int(address)


def _address_range(text: str) -> tuple[int, int]:
    first, dash, last = text.partition("-")
    if dash:
        return number(parse_address(first)), number(parse_address(last))
    if "/" not in text:
        return (number(parse_address(text)),) * 2
    network = parse_network(text)
    offset = _V4 if isinstance(network, IPv4Network) else 0
    return offset | int(network.network_address), offset | int(network.broadcast_address)


def _port_range(text: str) -> tuple[int, int]:
    first, colon, last = text.replace("-", ":").partition(":")
    return int(first or 0), int(last or 0xFFFF) if colon else int(first)


# The output of iptables-save (iptables-extensions(8)).

_PRIORITIES = {"raw": RAW, "mangle": MANGLE, "nat": NAT_DST}
_BUILT_IN = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")
_LONGEST = 160  # characters shown of a rule's text


def read_iptables(saved: str, tool: str) -> list[Table]:
    """Return the tables. Raises ValueError or LookupError.

    ``tool`` is iptables or ip6tables with its variant, such as "iptables-nft".
    """
    return [_table(found, tool) for found in kube_proxy.parse_rules(saved)]


def _table(found: kube_proxy.IptablesTable, tool: str) -> Table:
    table = Table(f"{tool}, table {found.name}", 6 if tool.startswith("ip6") else 4)
    for name in found.chains:
        hook = name.lower() if name in _BUILT_IN else ""
        priority = _PRIORITIES.get(found.name, 0)
        table.chains[name] = Chain(name, hook, priority, found.name == "nat")
    for rule in found.rules:
        shown = rule.text if len(rule.text) <= _LONGEST else f"{rule.text[:_LONGEST]}..."
        table.chains[rule.chain].rules.append(
            Rule(shown, tuple(map(_option, read_options(rule.text))))
        )
    return table


def _option(option: Option) -> Option:
    """An ipset of destinations is not read: the option becomes an unreadable one."""
    name, _, directions = option.value.partition(" ")
    if option.name == "--match-set" and "dst" in directions.split(","):
        return Option("-d", f"ipset {name}")
    return option
