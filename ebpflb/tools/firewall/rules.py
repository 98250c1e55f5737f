# SPDX-License-Identifier: Apache-2.0
"""Tables, chains and rules of netfilter in the words of iptables-save, whichever tool printed them.

Addresses are numbers of 128 bits, IPv4 as v4-mapped IPv6.
"""

from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network
from typing import NamedTuple

from ebpflb.model import kube_proxy
from ebpflb.model.addresses import Address, parse_address, parse_network

# Priorities of netfilter's hooks (uapi/linux/netfilter_ipv4.h).
RAW, MANGLE, NAT_DST = -300, -150, -100
KUBE_MARK = 0x4000  # kube-proxy's default --iptables-masquerade-bit
_ALL_BITS, _V4 = 0xFFFFFFFF, 0xFFFF << 32


class Option(NamedTuple):
    """One option of iptables-save, such as "--dport", "80"; nft's conditions are written as one."""

    name: str
    value: str = ""
    negated: bool = False


class Rule(NamedTuple):
    """A rule; ``text`` shows it to the operator."""

    text: str
    options: tuple[Option, ...]

    @property
    def targets(self) -> set[str]:
        """The actions, and the chain that the rule jumps to."""
        return {option.value for option in self.options if option.name in ("-j", "-g")}


@dataclass
class Chain:
    """``hook`` is netfilter's name in lower case, "" for a chain that only other chains jump to."""

    name: str
    hook: str = ""
    priority: int = 0
    is_nat: bool = False
    rules: list[Rule] = field(default_factory=list)


@dataclass
class Table:
    """``title`` names the table: "table inet filter", "iptables-legacy, table nat".

    ``family`` is 4 or 6 if the table has packets of one family only, else 0.
    """

    title: str
    family: int = 0
    chains: dict[str, Chain] = field(default_factory=dict)

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


def mark_and_mask(value: str) -> tuple[int, int]:
    """Parse MARK or MARK/MASK. Raises ValueError."""
    mark, _, mask = value.partition("/")
    return int(mark, 0), int(mask, 0) if mask else _ALL_BITS


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
