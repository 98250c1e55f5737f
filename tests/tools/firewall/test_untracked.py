# SPDX-License-Identifier: Apache-2.0
"""The destinations that a table exempts from conntrack, by its tool's output."""

from ipaddress import ip_address

import pytest

from ebpflb.kernel.netfilter.untracked import untracked
from ebpflb.model.nodes import Rules
from tests.tools.firewall.services import of_iptables, recorded

DNS, TCP, UDP = "10.96.0.10", 6, 17


def exempts(rules: str, address: str, port: int, protocol: int, tool: str = "iptables-nft") -> bool:
    """Whether table raw exempts a destination; ``rules`` are in PREROUTING by default."""
    lines = [it if it.startswith("-A") else f"-A PREROUTING {it}" for it in rules.splitlines()]
    saved = ["*raw", ":PREROUTING ACCEPT [0:0]", ":OUTPUT ACCEPT [0:0]", ":dns - [0:0]", *lines]
    (table,) = of_iptables("\n".join([*saved, "COMMIT", ""]), tool)
    return bool(Rules(untracked(table)).find(ip_address(address), port, protocol))


@pytest.mark.parametrize(
    "rule",
    [
        f"-d {DNS}/32 -p udp -m udp --dport 53 -j NOTRACK",
        f'-d {DNS}/32 -p udp -m udp --dport 53 -m comment --comment "a b" -j CT --notrack',
        "-d 10.96.0.0/16 -j CT --notrack",
        "-p udp -m multiport --dports 53,5353 -j CT --notrack",
        "! -d 10.1.0.0/16 -p udp -m udp --dport 50:60 -j CT --notrack",
        f"-d {DNS}/32 -j dns\n-A dns -p udp -m udp --dport 53 -j CT --notrack",
        f"-d {DNS}/32 -j dns\n-A dns -j CT --notrack",
    ],
)
def test_rules_of_the_destination_count(rule: str) -> None:
    assert exempts(rule, DNS, 53, UDP)
    assert not exempts(rule, "10.1.0.10", 443, TCP)


@pytest.mark.parametrize(
    "rule",
    [
        "-j CT --notrack",  # of all packets: no one means Services by it
        "-p udp -j CT --notrack",
        f"-d {DNS}/32 -i eth0 -j CT --notrack",
        f"-s 10.1.0.1/32 -d {DNS}/32 -j CT --notrack",
        f"-d {DNS}/32 -p udp -m udp --dport 54 -j CT --notrack",
        f"! -d {DNS}/32 -p udp -m udp --dport 53 -j CT --notrack",
        f"-d {DNS}/32 -p tcp -m tcp --dport 53 -j CT --notrack",
        f"-d {DNS}/32 -j CT --zone 5",
        f"-d {DNS}/32 -j ACCEPT",
        f"-A OUTPUT -d {DNS}/32 -j CT --notrack",
        f"-i eth0 -j dns\n-A dns -d {DNS}/32 -j CT --notrack",
        f"-A dns -d {DNS}/32 -j CT --notrack",
        f"-m set --match-set those dst -d {DNS}/32 -j CT --notrack",
    ],
)
def test_other_rules_do_not(rule: str) -> None:
    assert not exempts(rule, DNS, 53, UDP)


@pytest.mark.parametrize("tool", ["iptables-legacy", "iptables-nft", "nft"])
def test_as_each_tool_prints_them(tool: str) -> None:
    found = Rules(each for table in recorded(tool) for each in untracked(table))
    assert found.find(ip_address(DNS), 53, UDP)
    assert not found.find(ip_address(DNS), 53, TCP)
    assert not found.find(ip_address("10.112.0.10"), 53, UDP)
