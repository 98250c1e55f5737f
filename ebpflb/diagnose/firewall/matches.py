# SPDX-License-Identifier: Apache-2.0
"""What a rule asks of a packet, as far as it concerns what services change: its destination, the
destination before NAT, the mark.

Everything else that a rule asks is left out: it is the same with and without ebpflb.
Addresses are numbers of 128 bits, IPv4 as v4-mapped IPv6.
"""

from bisect import bisect_right
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv4Network
from typing import NamedTuple

from ebpflb.model.addresses import Address, Network, parse_address, parse_network

_V4 = 0xFFFF << 32
NO_ADDRESS_OR_PORT = -1  # no address and no port: nothing that a rule names


class View(NamedTuple):
    """What rules see of a request at one hook."""

    family: int  # 4 or 6
    protocol: int
    address: int  # the destination
    port: int
    local: bool  # the destination is an address of the node
    original_address: int  # the destination in conntrack's original direction
    original_port: int
    reply_address: int  # the source in its reply direction
    reply_port: int
    dnat: bool  # ct status dnat
    mark: int = 0
    mark_known: int = 0  # the bits of the mark that are known


class Ranges:
    """A set of numbers: first and last of each range."""

    def __init__(self, pairs: Iterable[tuple[int, int]]) -> None:
        ordered = sorted(pairs)
        merged: list[tuple[int, int]] = []
        for first, last in ordered:
            if merged and first <= merged[-1][1] + 1:
                merged[-1] = merged[-1][0], max(last, merged[-1][1])
            else:
                merged.append((first, last))
        self.pairs = tuple(merged)
        self._firsts = [first for first, _ in merged]

    def __contains__(self, number: int) -> bool:
        index = bisect_right(self._firsts, number) - 1
        return index >= 0 and number <= self.pairs[index][1]

    def __repr__(self) -> str:
        return f"Ranges({list(self.pairs)})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and self.pairs == other.pairs

    def __hash__(self) -> int:
        return hash(self.pairs)


class Match(NamedTuple):
    """The field of a View that it is named after is in the ranges, or is not."""

    field: str
    ranges: Ranges
    negated: bool = False

    def holds(self, view: View) -> bool:
        return (getattr(view, self.field) in self.ranges) != self.negated


class AnyOf(NamedTuple):
    """At least one of several matches holds, or none does (nft: elements of concatenations)."""

    choices: tuple[tuple[Match, ...], ...]
    negated: bool = False

    def holds(self, view: View) -> bool:
        return any(all(m.holds(view) for m in each) for each in self.choices) != self.negated


class Truth(NamedTuple):
    """A field that is true or false: ``local`` or ``dnat``."""

    field: str
    negated: bool = False

    def holds(self, view: View) -> bool:
        return bool(getattr(view, self.field)) != self.negated


class MarkMatch(NamedTuple):
    """The mark under the mask. It holds where bits that are not known might decide."""

    mark: int
    mask: int
    negated: bool = False

    def holds(self, view: View) -> bool:
        known = view.mark_known & self.mask
        if (view.mark ^ self.mark) & known:
            return self.negated
        return bool(self.mask & ~known) or not self.negated


class Unknown(NamedTuple):
    """Something about the destination that cannot be read: the rule is not compared."""

    what: str
    negated: bool = False

    def holds(self, _: View) -> bool:
        return True


AnyMatch = Match | AnyOf | Truth | MarkMatch | Unknown


def mark_match(mark: int, mask: int, *, negated: bool) -> MarkMatch:
    """That one bit is not zero says what it is."""
    if not mark and mask.bit_count() == 1:
        return MarkMatch(mask, mask, not negated)
    return MarkMatch(mark, mask, negated)


def fields(match: AnyMatch) -> frozenset[str]:
    """The fields of a View that it is about."""
    if isinstance(match, AnyOf):
        return frozenset(each.field for choice in match.choices for each in choice)
    if isinstance(match, MarkMatch):
        return frozenset(("mark",))
    return frozenset() if isinstance(match, Unknown) else frozenset((match.field,))


def number(address: Address) -> int:
    return _V4 | int(address) if isinstance(address, IPv4Address) else int(address)


def network_range(network: Network) -> tuple[int, int]:
    offset = _V4 if isinstance(network, IPv4Network) else 0
    return offset | int(network.network_address), offset | int(network.broadcast_address)


def address_range(text: str) -> tuple[int, int]:
    """Of "ADDRESS", "ADDRESS/LENGTH", "ADDRESS/MASK" or "FIRST-LAST". Raises ValueError."""
    first, dash, last = text.partition("-")
    if dash:
        return number(parse_address(first)), number(parse_address(last))
    host, slash, length = text.partition("/")
    if not slash:
        return (number(parse_address(host)),) * 2
    if not length.isdigit():
        length = str(int(parse_address(length)).bit_count())  # iptables: any mask that is no length
    return network_range(parse_network(f"{host}/{length}"))


def port_range(text: str) -> tuple[int, int]:
    """Of "N", "N:M", "N:" or ":M" (iptables) or "N-M". Raises ValueError."""
    first, colon, last = text.replace("-", ":").partition(":")
    if not colon:
        return int(first), int(first)
    return int(first or 0), int(last or 0xFFFF)
