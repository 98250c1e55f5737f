# SPDX-License-Identifier: Apache-2.0
"""Each finding is one line that names the rule, and one that says what to do instead."""

from dataclasses import replace

import pytest

from ebpflb.diagnose.firewall import advice, iptables_parser
from ebpflb.model.packet_path import Engine
from tests.diagnose.firewall.services import node, search

PREROUTING, FORWARD = "raw\n-A PREROUTING", "filter\n-A FORWARD"
CASES = [
    ("flows", f"{PREROUTING} -p tcp -m tcp --dport 30080 -j DROP", "--nodeport-source-ranges"),
    ("flows", f"{PREROUTING} -d 203.0.113.10/32 -j DROP", "loadBalancerSourceRanges"),
    ("flows", f"{PREROUTING} -p tcp -m tcp --dport 30080 -j DROP", "NetworkPolicy"),
    ("flows", f"{PREROUTING} -p tcp -m tcp --dport 30080 -j DROP", "in FORWARD"),
    ("flows", f"{PREROUTING} -p tcp -m tcp --dport 30080 -j DROP", "--packet-path=netfilter"),
    ("flows", f"{PREROUTING} -d 10.96.0.10/32 -j DROP", "--socket-translation=host and --packet"),
    ("netfilter", f"{PREROUTING} -d 10.96.0.10/32 -j DROP", "or --socket-translation=host"),
    ("flows", f"{PREROUTING} -d 10.244.1.11/32 -j DROP", "accept before it what has the mark"),
    ("flows", f"{FORWARD} -m conntrack --ctstate DNAT -j ACCEPT", "--packet-mark"),
    (
        "flows",
        f"{FORWARD} -m mark --mark 0x4000/0x4000 -j ACCEPT",
        "--packet-mark with kube-proxy's mark",
    ),
    ("flows", f"{FORWARD} -m mark --mark 0x4000/0x4000 -j ACCEPT", "--packet-path=netfilter"),
    ("flows", f"{FORWARD} -d 203.0.113.10/32 -j DROP", "as beside kube-proxy"),
    ("flows", "filter\n-A OUTPUT -d 10.96.0.10/32 -j DROP", "sockets are connected to it"),
    (
        "flows",
        "nat\n-A PREROUTING -d 203.0.113.10/32 -j REDIRECT --to-ports 1",
        "that no service has",
    ),
    (
        "netfilter",
        "nat\n-A PREROUTING -d 203.0.113.10/32 -j REDIRECT --to-ports 1",
        "services come first",
    ),
    (
        "flows",
        "nat\n-A POSTROUTING -m conntrack --ctstate DNAT -j MASQUERADE",
        "--packet-path=netfilter",
    ),
    (
        "flows",
        "mangle\n-A PREROUTING -m addrtype --dst-type LOCAL -j CONNMARK --set-xmark 0x80/0x80",
        "ip rule add iif <pod's device> to <clients> lookup main",
    ),
    (
        "flows",
        "mangle\n-A PREROUTING -m addrtype --dst-type LOCAL -j CONNMARK --set-xmark 0x80/0x80",
        "--reply-path=request-device",
    ),
    (
        "flows",
        "mangle\n-A PREROUTING -m addrtype --dst-type LOCAL -j MARK --set-xmark 0x9/0x9",
        "match the endpoint's address and port",
    ),
]


@pytest.mark.parametrize(("engine", "rule", "wanted"), CASES)
def test_what_to_do_instead(engine: str, rule: str, wanted: str) -> None:
    """What docs/firewalls.md says, in the words of options."""
    table, text = rule.split("\n")
    chain = text.split()[1]
    saved = f"*{table}\n:{chain} ACCEPT [0:0]\n{text}\nCOMMIT\n"
    at = node(Engine(engine))
    (found,) = search(iptables_parser.parse(saved, "iptables-legacy"), at)
    assert wanted in advice.remedy(found, at)
    line = advice.line(found)
    assert line.startswith(
        f"iptables-legacy, table {table}, chain {chain}: {text.split(' ', 2)[2]}"
    )
    assert "\n" not in line + advice.remedy(found, at)


@pytest.mark.parametrize(("engine", "rule", "wanted"), CASES)
def test_what_is_in_force_is_no_remedy(engine: str, rule: str, wanted: str) -> None:
    """Neither the engine nor where sockets are translated."""
    table, text = rule.split("\n")
    saved = f"*{table}\n:{text.split()[1]} ACCEPT [0:0]\n{text}\nCOMMIT\n"
    (found,) = search(iptables_parser.parse(saved, "iptables-legacy"), node(Engine(engine)))
    in_force = replace(node(Engine.NETFILTER), host_sockets=True)
    said = advice.remedy(found, in_force)
    assert said and not {"--packet-path=netfilter", "--socket-translation=host"} & {*said.split()}


def test_long_rules_are_shortened() -> None:
    """A rule of iptables may have thousands of characters."""
    ports = ",".join(str(30080 - number) for number in range(14))
    comment = f'-m comment --comment "{"x" * 240}"'
    text = f"-A INPUT {comment} -p tcp -m multiport --dports {ports} -j ACCEPT"
    saved = f"*filter\n:INPUT ACCEPT [0:0]\n{text}\nCOMMIT\n"
    at = node(Engine.FLOWS)
    (found,) = search(iptables_parser.parse(saved, "iptables-legacy"), at)
    assert len(advice.line(found)) < 300


def test_rules_in_pods_name_the_option() -> None:
    """A mesh's redirection: --socket-translation=host."""
    saved = "*nat\n:OUTPUT ACCEPT [0:0]\n-A OUTPUT -p tcp -j REDIRECT --to-ports 15001\nCOMMIT\n"
    at = node(Engine.FLOWS)
    (found,) = search(iptables_parser.parse(saved, "iptables-nft"), at, in_pod=True)
    assert advice.remedy(found, at) == "--socket-translation=host"
