# SPDX-License-Identifier: Apache-2.0
"""Rules for each packet, as the tools print them, and the result of `ebpflb check`."""

import subprocess
from pathlib import Path

import pytest

from ebpflb.kernel.netfilter import flowtable
from ebpflb.kernel.netfilter.each_packet import each_packet, read_rules
from ebpflb.kernel.netfilter.firewall import tables
from ebpflb.tools import check
from ebpflb.tools.node_checks import WARNING, CheckResult
from tests.kernel.node import nodes, rules

pytestmark = pytest.mark.usefixtures("fresh_netns")

CAN_DROP = "can drop packets of open connections"
NFT = """
table inet operator {{
    set banned {{ type ipv4_addr; }}
    map bans {{ type ipv4_addr : verdict; elements = {{ 192.0.2.7 : drop }}; }}
    chain deeper {{
        log prefix "deeper"
    }}
    chain empty {{
    }}
    chain taking {{
        ct state vmap {{ established : accept, related : accept }}
    }}
    chain taking_some {{
        ip saddr 192.0.2.7 ct state established accept
    }}
    chain forward {{
        type filter hook forward priority 0
        {}
    }}
}}
"""
STATES = """
table inet operator {
    set bad { type ct_state; elements = { invalid }; }
    map fates { type ct_state : verdict; elements = { invalid : drop }; }
}
"""
OF_NFT = [
    ("counter", "counts each packet"),
    ("limit rate 10/second accept", "limits each packet"),
    ("quota over 10 mbytes drop", CAN_DROP),
    ("ip dscp set cs1", "changes each packet"),
    ("ct state established,related log", "logs each packet"),
    ("jump deeper", "logs each packet"),
    ("limit rate 10/second jump empty", "limits each packet"),
    ("ct state established return; log", "logs each packet"),
    ("jump taking_some; log", "logs each packet"),
    ("ct state established counter", "counts each packet"),
    ("ip saddr 192.0.2.7 counter drop", CAN_DROP),
    ("ip saddr @banned reject", CAN_DROP),
    ("ip saddr vmap @bans", CAN_DROP),
]
NOT_OF_NFT = [
    "ct state new log",
    "ct state { new, invalid } log",
    "meta l4proto icmp drop",
    "jump taking; ip saddr @banned drop",
    "ct state established accept; log",
    "jump taking; log",
    "ct state new jump deeper",
    "ct state vmap { established : accept, related : accept, invalid : drop }; log",
    "ct state vmap { established : accept, related : accept, new : jump deeper }; log",
    "tcp flags syn tcp option maxseg size set rt mtu",
]
INVALID = [
    "ct state invalid drop",
    "ct state { new, invalid } log",
    "ct state != established,related drop",
    "ct state != { established, related } drop",
    "ct state & (invalid | new) != 0 drop",
    "ct state & (established | related) == 0 drop",
    "ct state . meta l4proto { invalid . tcp } drop",
    "ct state @bad drop",
    "ct state vmap { established : accept, invalid : drop }",
    "ct state vmap @fates",
    "meta mark set ct state map { established : 0x1, invalid : 0x2 }",
]
NOT_INVALID = [
    "ct state established,related accept",
    "ct state new tcp dport 22 accept",
    "ct state != invalid accept",
    "ct state vmap { established : accept, related : accept }",
    'tcp dport 1 drop comment "invalid"',
]


def of_nft(rule: str) -> list[str]:
    """Return the lines for a chain with this rule, as nft prints it."""
    text = NFT.format(rule.replace("; ", "\n        "))
    subprocess.run(["nft", "-f", "-"], input=text, text=True, check=True)
    return lines()


def lines() -> list[str]:
    """Return the lines for all rules in this namespace."""
    unread = list[str]()
    found = [line for each in tables(unread) for line in each_packet(each)]
    assert not unread
    return found


@pytest.mark.parametrize(("rule", "done"), OF_NFT)
def test_rules_of_nft_that_work_on_each_packet_are_named(rule: str, done: str) -> None:
    """Rules that work on each packet are named, whatever their chain."""
    (line,) = of_nft(rule)
    assert line.startswith("table inet operator, chain ")
    assert line.endswith(f": {done}")


@pytest.mark.parametrize("rule", NOT_OF_NFT)
def test_rules_of_nft_for_openings_are_not(rule: str) -> None:
    """Rules for opening packets are not named, nor rules after established connections were
    accepted.
    """
    assert not of_nft(rule)


def for_invalid(rule: str) -> str:
    subprocess.run(["nft", "-f", "-"], input=STATES + NFT.format(rule), text=True, check=True)
    return read_rules().invalid


@pytest.mark.parametrize("rule", INVALID)
def test_rules_of_nft_for_invalid_packets_are_named(rule: str) -> None:
    """They ask by name, in a set or map, by bits, or by excluding other states."""
    assert for_invalid(rule).startswith("table inet operator, chain forward: handle ")


@pytest.mark.parametrize("rule", NOT_INVALID)
def test_other_rules_of_nft_are_not_for_invalid_packets(rule: str) -> None:
    assert not for_invalid(rule)


@pytest.mark.parametrize("tool", nodes.TOOLS, ids=lambda tool: tool.name)
def test_kube_proxy_and_kubelet_have_none(tool: nodes.Tool) -> None:
    """On a node with only the rules of kube-proxy and kubelet, --fast-forward bypasses none."""
    nodes.load(tool, rules.IPTABLES_MODE, rules.KUBELET, rules.PORTMAP)
    nodes.load_nft()
    assert not lines()


def checked(tmp_path: Path) -> CheckResult:
    """Return the row of `ebpflb check`."""
    rows = check.other_software(tmp_path / "none", None)
    (row,) = [each for each in rows if each.feature == "rules for each packet"]
    return row


def bypass() -> None:
    """Make the table of an agent's flowtable."""
    subprocess.run(["nft", "add", *str(flowtable.TABLE).split()], check=True)


def test_check_says_that_fast_forward_is_unwise(tmp_path: Path) -> None:
    """`check` names some rules, and routing rules with a mark; they are no fault if --fast-forward
    is off.
    """
    assert checked(tmp_path).ok
    of_nft("counter")
    subprocess.run(["ip", "rule", "add", "fwmark", "0x80/0x80", "lookup", "100"], check=True)
    off = checked(tmp_path)
    assert off.ok and "--fast-forward, which is off" in off.detail
    bypass()
    row = checked(tmp_path)
    assert row.result == WARNING
    assert "table inet operator, chain forward" in row.detail
    assert "fwmark 0x80" in row.detail
    assert "--fast-forward=off" in row.remedy


def test_check_names_three_and_says_how_many_more_there_are(tmp_path: Path) -> None:
    """`check` names three rules and counts the rest, because a node may have thousands."""
    of_nft("; ".join(["counter"] * 5))
    bypass()
    assert checked(tmp_path).detail.endswith("; 2 more")
