# SPDX-License-Identifier: Apache-2.0
"""Which destinations rules in raw exempt from conntrack, and so from kube-proxy's NAT.

kube-proxy translates by conntrack, so a packet that a rule with NOTRACK matched goes where its
destination says: to a listener at a cluster IP on this node, as NodeLocal DNSCache has one
(docs/node-local.md). ebpflb leaves these packets alone too.
"""

from typing import NamedTuple

from ebpflb.model.addresses import Address, number

Ranges = tuple[tuple[int, int], ...]


class Condition(NamedTuple):
    """The addresses or ports that a rule asks of the destination."""

    of_address: bool
    ranges: Ranges
    negated: bool

    def holds(self, address: int, port: int) -> bool:
        value = address if self.of_address else port
        return any(first <= value <= last for first, last in self.ranges) != self.negated


class Destination(NamedTuple):
    """The destinations of one rule: one of the protocols, and all conditions hold."""

    protocols: frozenset[int]
    conditions: tuple[Condition, ...]

    def has(self, address: Address, port: int, protocol: int) -> bool:
        return protocol in self.protocols and all(
            condition.holds(number(address), port) for condition in self.conditions
        )


class Untracked(NamedTuple):
    """A message to the agent's loop: the destinations that rules exempt now."""

    destinations: frozenset[Destination] = frozenset()

    def has(self, address: Address, port: int, protocol: int) -> bool:
        return any(it.has(address, port, protocol) for it in self.destinations)


NO_UNTRACKED = Untracked()
