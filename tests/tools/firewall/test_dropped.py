# SPDX-License-Identifier: Apache-2.0
"""The destinations that rules of PREROUTING and FORWARD drop, by their tools' output."""

from ipaddress import ip_address
from itertools import pairwise
from typing import Any

import pytest

from ebpflb.kernel.netfilter.firewall import Rule
from ebpflb.kernel.netfilter.untracked import dropped
from ebpflb.model.nodes import Destination, Rules
from tests.tools.firewall.services import of_iptables

VIP, TCP = "192.0.2.200", 6


def drops(
    rules: str, table: str = "filter", chain: str = "FORWARD", address: str = VIP
) -> list[str]:
    """The rules that drop a request to port 80; ``rules`` are in the chain by default."""
    lines = [it if it.startswith("-A") else f"-A {chain} {it}" for it in rules.splitlines()]
    heads = [f":{chain} ACCEPT [0:0]", ":OUTPUT ACCEPT [0:0]", ":mine - [0:0]", ":KUBE-FORWARD -"]
    (found,) = of_iptables("\n".join([f"*{table}", *heads, *lines, "COMMIT", ""]), "iptables-nft")
    place = ip_address(address), 80, TCP
    return [each.rule for each in dropped(found) if Rules([each]).find(*place)]


@pytest.mark.parametrize(
    "rules",
    [
        f"-d {VIP}/32 -j DROP",
        f"-s 198.51.100.0/24 -d {VIP}/32 -i eth0 -p tcp -m tcp --dport 80 -j REJECT",
        f"-m conntrack --ctorigdst {VIP}/32 --ctstate NEW -j DROP",
        "! -d 10.0.0.0/8 -j DROP",
        "-m set --match-set those dst -j DROP",  # which cannot be read
        f"-d {VIP}/32 -j mine\n-A mine -s 198.51.100.1/32 -j DROP",
        f"-j mine\n-A mine -j mine\n-A mine -d {VIP}/32 -j DROP",
    ],
)
def test_a_rule_that_names_the_address_counts(rules: str) -> None:
    for table, chain in (("filter", "FORWARD"), ("raw", "PREROUTING"), ("mangle", "PREROUTING")):
        assert len(drops(rules, table, chain)) == 1
        assert not drops(rules, table, chain, "2001:db8::200"), "the table is of IPv4"


@pytest.mark.parametrize(
    "rules",
    [
        "-s 198.51.100.1/32 -j DROP",  # of a client: it names no Service
        "-m set --match-set banned src -j DROP",
        "-d 192.0.2.201/32 -j DROP",
        f"-d {VIP}/32 -p udp -j DROP",
        f"-d {VIP}/32 -p tcp -m tcp --dport 81 -j DROP",
        f"-d {VIP}/32 -j ACCEPT",
        f"-A OUTPUT -d {VIP}/32 -j DROP",
        f"-d 192.0.2.0/28 -j mine\n-A mine -d {VIP}/32 -j DROP",
        f"-A mine -d {VIP}/32 -j DROP",
        f"-j KUBE-FORWARD\n-A KUBE-FORWARD -d {VIP}/32 -j DROP",
    ],
)
def test_other_rules_do_not(rules: str) -> None:
    assert not drops(rules)


def test_many_ways_to_a_chain_are_read_once() -> None:
    """Policies of a CNI lead to the same chains from each pod."""
    chains = [f"c{number}" for number in range(30)]
    jumps = [f"-A {a} -i eth{n} -j {b}" for a, b in pairwise(chains) for n in range(9)]
    heads = [":FORWARD ACCEPT [0:0]", *(f":{name} - [0:0]" for name in chains)]
    rules = ["-A FORWARD -j c0", *jumps, f"-A {chains[-1]} -d {VIP}/32 -j DROP", "COMMIT", ""]
    (found,) = of_iptables("\n".join(["*filter", *heads, *rules]), "iptables-nft")
    assert len(list(dropped(found))) == 1


def test_rules_for_other_addresses_are_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CNI may have some for each pod, and a tenant any number of addresses."""
    asked, has = list[Destination](), Destination.has

    def counted(self: Destination, *place: Any) -> bool:
        asked.append(self)
        return has(self, *place)

    monkeypatch.setattr(Destination, "has", counted)
    lines = [f"-A FORWARD -d 10.1.0.{number}/32 -j DROP" for number in range(100)]
    rules = ["*filter", ":FORWARD ACCEPT [0:0]", *lines, "-A FORWARD ! -d 10.0.0.0/8 -j DROP"]
    (found,) = of_iptables("\n".join([*rules, "COMMIT", ""]), "iptables-nft")
    drops = Rules(dropped(found))
    for address, rule in (("10.1.0.7", "-d 10.1.0.7/32 -j DROP"), (VIP, "! -d 10.0.0.0/8 -j DROP")):
        found_rule = drops.find(ip_address(address), 80, TCP)
        assert found_rule and found_rule.rule.endswith(rule)
    assert not drops.find(ip_address("10.2.0.1"), 80, TCP)
    assert len(asked) == 3


def test_chains_that_lead_to_no_drop_are_not_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As those of a tenant's policies, which a CNI asks for each pod."""
    read, is_for = set[str](), Rule.is_for

    def noted(self: Rule, protocol: int) -> bool:
        read.add(self.text)
        return is_for(self, protocol)

    monkeypatch.setattr(Rule, "is_for", noted)
    heads = [":FORWARD ACCEPT [0:0]", ":policy - [0:0]", *(f":pod{n} - [0:0]" for n in range(9))]
    jumps = [f"-A FORWARD -d 10.1.0.{n}/32 -j pod{n}\n-A pod{n} -j policy" for n in range(9)]
    drops = [f"-A pod{n} -j REJECT" for n in range(9)]
    rules = [*jumps, *drops, "-A policy -s 10.2.0.0/16 -j RETURN"]
    (found,) = of_iptables("\n".join(["*filter", *heads, *rules]), "iptables-nft")
    assert len(list(dropped(found))) == 9
    assert "-j REJECT" in read and "-s 10.2.0.0/16 -j RETURN" not in read
