# SPDX-License-Identifier: Apache-2.0
"""Firewall rules in one form, whichever tool printed them.

A rule is a list of options, conditions and actions, with the names that iptables-save or nft gives
them. ``firewall_reader`` makes them from the output of the tools.
"""

from collections.abc import Callable, Iterator
from functools import cached_property, lru_cache

from msgspec import Struct

from ebpflb.model import kube_proxy
from ebpflb.model.addresses import number, parse_address, parse_network
from ebpflb.model.kube_proxy import Option
from ebpflb.model.services import Protocol
from ebpflb.model.untracked import Condition, Ranges

NAT_DST = -100  # the priority of iptables' table nat (uapi/linux/netfilter_ipv4.h)

# The destination of a packet, and before NAT, as iptables and nft name them.
_ORIGINAL_ADDRESSES = {"--ctorigdst", "ip daddr", "ip6 daddr"}
_ORIGINAL = {*_ORIGINAL_ADDRESSES, "--ctorigdstport", "proto-dst"}
_ADDRESSES = {"-d", "--dst-range", "daddr", *_ORIGINAL_ADDRESSES}
_PORTS = {"--dport", "--dports", "--ctorigdstport", "dport", "proto-dst"}
_PROTOCOLS = {"-p", "protocol", "nexthdr", "l4proto"}
_UNTRACKING = {"--notrack", "notrack"}  # of iptables' target CT, and of nft
NOT_READ = Option("-d", "a condition that is not read")


class Rule(Struct, frozen=True, dict=True):
    """A rule; ``text`` shows it to the operator."""

    text: str
    options: tuple[Option, ...]

    @cached_property
    def names(self) -> set[str]:
        return {option.name for option in self.options}

    @cached_property
    def targets(self) -> set[str]:
        """The actions, and the chains that the rule jumps to."""
        return {option.value for option in self.options if option.name in ("-j", "-g")}

    @cached_property
    def conditions(self) -> list[Condition]:
        """The conditions on the destination. Raises ValueError if one cannot be read."""
        return [
            Condition(name in _ADDRESSES, _ranges(value, is_port=name in _PORTS), negated)
            for name, value, negated in self.options
            if name in _ADDRESSES | _PORTS
        ]

    @property
    def asks_for_original(self) -> bool:
        """Whether the rule asks for the destination before NAT, which conntrack knows."""
        return not _ORIGINAL.isdisjoint(self.names)

    def matches(self, protocol: int, address: int, port: int) -> bool:
        """Whether the rule matches this destination; its other conditions are not considered."""
        holds = all(condition.holds(address, port) for condition in self.conditions)
        return holds and self.is_for(protocol)

    def is_for(self, protocol: int) -> bool:
        """Whether the rule matches packets of this protocol."""
        names = {"all", str(protocol), Protocol(protocol).name.lower()}
        return all(
            names.isdisjoint(option.value.split(",")) == option.negated
            for option in self.options
            if option.name in _PROTOCOLS
        )

    @property
    def exempts(self) -> bool:
        """Whether the rule exempts packets from conntrack."""
        return "NOTRACK" in self.targets or not _UNTRACKING.isdisjoint(self.names)


class Chain(Struct):
    """``hook`` is netfilter's name in lower case, "" for a chain that only other chains jump to.

    Only base chains have a ``policy``: ACCEPT or DROP.
    """

    name: str
    hook: str = ""
    priority: int = 0
    is_nat: bool = False
    policy: str = ""
    rules: list[Rule] = []


class Table(Struct):
    """``title`` names the table: "table inet filter", "iptables-legacy, table nat".

    ``family`` is that of its packets, as nft names it.
    """

    title: str
    chains: dict[str, Chain] = {}
    family: str = "inet"

    def reached_from(
        self,
        chain: Chain,
        follow: Callable[[Rule], bool] = lambda rule: True,
        *,
        with_kube_proxy: bool = False,
    ) -> Iterator[tuple[str, Rule]]:
        """Yield rules of a chain and of those that it leads to, each with its chain's name.

        ``follow`` tells which rules are yielded, and followed into other chains.
        ``with_kube_proxy``: also into kube-proxy's.
        """
        waiting = [chain.name]
        for name in waiting:
            for rule in filter(follow, self.chains[name].rules):
                yield name, rule
                waiting += [
                    target
                    for target in rule.targets & self.chains.keys()
                    if target not in waiting
                    and (with_kube_proxy or not kube_proxy.is_chain(target))
                ]


@lru_cache(maxsize=1024)
def _ranges(values: str, *, is_port: bool) -> Ranges:
    """Parse numbers, networks, and ranges of numbers, separated by commas. Raises ValueError."""
    parse = _port_range if is_port else _address_range
    return tuple(parse(value) for value in values.split(",") if value)


def _port_range(text: str) -> tuple[int, int]:
    first, _, last = text.replace(":", "-").partition("-")
    return int(first), int(last or first)


def _address_range(text: str) -> tuple[int, int]:
    if "/" in text:
        network = parse_network(text)
        return number(network.network_address), number(network.broadcast_address)
    first, _, last = text.partition("-")
    return number(parse_address(first)), number(parse_address(last or first))
