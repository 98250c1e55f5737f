# SPDX-License-Identifier: Apache-2.0
"""Rules that match ipsets of destinations are compared by what is in the sets."""

import pytest

from ebpflb.diagnose.firewall import iptables_parser
from ebpflb.diagnose.firewall.ipset import Sets
from ebpflb.diagnose.firewall.rule_search import RuleSearch
from ebpflb.diagnose.firewall.service_traffic import Traffic
from ebpflb.model.packet_path import Engine
from tests.diagnose.firewall.services import SERVICES, node

# As ipset 7.17 prints it, without what it says of sizes.
SAVED = """create web hash:ip,port family inet
add web 203.0.113.10,tcp:80
add web 203.0.113.11,udp:90
create other hash:ip,port family inet
add other 203.0.113.10,tcp:81
add other 203.0.113.11,udp:80
create excepted hash:net family inet
add excepted 203.0.113.10 nomatch
add excepted 203.0.113.0/24
create ports bitmap:port range 0-65535
add ports 30079
add ports 30080
create services hash:net family inet
add services 203.0.113.0/24
create v6 hash:ip family inet6 timeout 300
add v6 fd00:96::10 timeout 99
create counted hash:ip family inet counters comment
add counted 203.0.113.10 packets 0 bytes 0 comment "a, b"
create clients hash:ip family inet
add clients 198.51.100.1
create empty hash:ip family inet
create device hash:net,iface family inet
add device 203.0.113.0/24,eth0
create listed list:set size 8
add listed clients
add listed services
add listed missing6
create missing6 hash:ip family inet
create pairs list:set size 8
add pairs other
add pairs web
create others list:set size 8
add others web
add others clients
create unread list:set size 8
add unread strange
create back hash:net family inet comment
add back 203.0.113.0/24
add back 203.0.113.0/28 nomatch
add back 203.0.113.10 comment "no nomatch"
create out hash:net,port family inet
add out 203.0.113.0/24,tcp:80 nomatch
create strange hash:ip,port family inet
add strange nonsense
"""
CASES = [
    ("web dst,dst", "found"),
    ("other dst,dst", "not"),
    ("ports dst", "found"),
    ("ports src", "not"),
    ("services dst", "found"),
    ("counted dst", "found"),
    ("clients src", "not"),
    ("clients dst", "not"),
    ("empty dst", "not"),
    ("device dst,dst", "found"),
    ("web src,src", "not"),
    ("excepted dst", "not"),
    ("back dst", "found"),
    ("out dst,dst", "unknown"),
    ("listed dst", "found"),
    ("pairs dst,dst", "found"),
    ("others dst", "not"),
    ("unread dst,dst", "unknown"),
    ("strange dst,dst", "unknown"),
    ("missing dst", "unknown"),
]


def search(rule: str, tool: str = "iptables-nft") -> tuple[bool, int]:
    """Whether a rule in raw PREROUTING is found, and how many cannot be read."""
    saved = f"*raw\n:PREROUTING ACCEPT [0:0]\n-A PREROUTING {rule} -j ACCEPT\nCOMMIT\n"
    flows = node(Engine.FLOWS)
    made = RuleSearch(Traffic(SERVICES, flows), flows)
    made.add(iptables_parser.parse(saved, tool, Sets(SAVED)))
    return bool(made.findings), made.skipped


@pytest.mark.parametrize(("match", "expected"), CASES)
def test_sets(match: str, expected: str) -> None:
    """By addresses and ports of the members that are destinations; what is not known is counted."""
    found = search(f"-m set --match-set {match}")
    assert found == (expected == "found", int(expected == "unknown"))


def test_set_of_ipv6() -> None:
    """Timeouts of members are left out."""
    assert search("-m set --match-set v6 dst", "ip6tables-nft") == (True, 0)


def test_negated() -> None:
    """A rule for what is not in a set names nothing."""
    assert search("-m set ! --match-set services dst") == (False, 0)
