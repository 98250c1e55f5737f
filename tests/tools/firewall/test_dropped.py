# SPDX-License-Identifier: Apache-2.0
"""The destinations that rules of PREROUTING and FORWARD drop, by their tools' output."""

from ipaddress import ip_address
from itertools import pairwise

import pytest

from ebpflb.kernel.netfilter.dropped import dropped
from tests.tools.firewall.services import of_iptables

VIP, TCP = "192.0.2.200", 6


def drops(rules: str, table: str = "filter", chain: str = "FORWARD") -> list[str]:
    """The rules that drop a request to port 80; ``rules`` are in the chain by default."""
    lines = [it if it.startswith("-A") else f"-A {chain} {it}" for it in rules.splitlines()]
    heads = [f":{chain} ACCEPT [0:0]", ":OUTPUT ACCEPT [0:0]", ":mine - [0:0]", ":KUBE-FORWARD -"]
    (found,) = of_iptables("\n".join([f"*{table}", *heads, *lines, "COMMIT", ""]), "iptables-nft")
    return [it.rule for it in dropped(found) if it.has(ip_address(VIP), 80, TCP)]


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
