# SPDX-License-Identifier: Apache-2.0
"""Rules that act on each packet of a connection, which --fast-forward would bypass."""

from collections.abc import Callable, Iterator

import pytest

from ebpflb.kernel.netfilter.each_packet import each_packet, for_invalid
from ebpflb.kernel.netfilter.firewall import Table, read_nft
from tests.tools.firewall.services import of_iptables

CAN_DROP = "can drop packets of open connections"
AN_IPSET = "asks an ipset, whose changes cannot be seen"
EACH = [
    ("FORWARD", "-j LOG", "logs each packet"),
    ("FORWARD", "-s 192.0.2.0/24 -m limit --limit 10/sec -j ACCEPT", "limits each packet"),
    ("FORWARD", "-m quota --quota 1000 -j ACCEPT", "counts each packet"),
    ("FORWARD", "-m conntrack --ctstate NEW -j NFQUEUE --queue-num 1", "queues packets"),
    ("FORWARD", "-m conntrack ! --ctstate NEW -j NFLOG", "logs each packet"),
    ("FORWARD", "-s 192.0.2.7/32 -j DROP", CAN_DROP),
    ("FORWARD", "-p tcp -m tcp --tcp-flags SYN,FIN SYN,FIN -j REJECT", CAN_DROP),
    ("FORWARD", "-m set --match-set friends dst -j ACCEPT", AN_IPSET),
    ("FORWARD", "-m set --match-set friends src -j ACCEPT", AN_IPSET),
    ("POSTROUTING", "-j DSCP --set-dscp 0x08", "changes each packet"),
    ("POSTROUTING", "-s 192.0.2.7/32 -j DROP", CAN_DROP),
    ("PREROUTING", "-i eth0 -j LOG", "logs each packet"),
    ("PREROUTING", "-s 192.0.2.7/32 -j DROP", CAN_DROP),
]
OPENINGS = [
    ("FORWARD", "-p icmp -j DROP"),
    ("INPUT", "-s 192.0.2.7/32 -j DROP"),
    ("FORWARD", "-m conntrack --ctstate INVALID -j DROP"),
    ("FORWARD", "-m conntrack --ctstate NEW -j LOG"),
    ("FORWARD", "-p tcp -m tcp --tcp-flags SYN,RST SYN -j TCPMSS --clamp-mss-to-pmtu"),
    ("FORWARD", "-m conntrack ! --ctstate ESTABLISHED -j LOG"),
    ("FORWARD", "-j MARK --set-xmark 0x9/0x9"),
    ("INPUT", "-j LOG"),
    ("OUTPUT", "-j LOG"),
]
TABLE = {"POSTROUTING": "mangle", "PREROUTING": "mangle"}


INVALID = [
    ("FORWARD", "-m conntrack --ctstate INVALID -j DROP"),
    ("FORWARD", "-m state --state NEW,INVALID -j before"),
    ("INPUT", "-m conntrack ! --ctstate RELATED,ESTABLISHED -j DROP"),
]
NOT_INVALID = [
    ("FORWARD", "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"),
    ("FORWARD", "-m conntrack ! --ctstate INVALID -j ACCEPT"),
    ("FORWARD", "-m conntrack --ctstate DNAT -j ACCEPT"),
    ("FORWARD", '-m comment --comment "--ctstate INVALID" -j DROP'),
    ("FORWARD", "-m set --match-set banned dst -j DROP"),
]


def found(
    chain: str, *texts: str, before: str = "", lines: Callable[[Table], Iterator[str]] = each_packet
) -> list[str]:
    """Return the findings for these rules of a chain; chain "before" has rules too."""
    saved = "".join(f"-A {chain} {text}\n" for text in texts)
    chains = f":{chain} ACCEPT [0:0]\n:before - [0:0]\n"
    chains += f"-A before {before}\n" if before else ""
    saved = f"*{TABLE.get(chain, 'filter')}\n{chains}{saved}COMMIT\n"
    return [line for each in of_iptables(saved, "iptables") for line in lines(each)]


@pytest.mark.parametrize(("chain", "text", "done"), EACH)
def test_rules_that_work_on_each_packet_are_named(chain: str, text: str, done: str) -> None:
    """Each rule is named with its effect."""
    table = TABLE.get(chain, "filter")
    assert found(chain, text) == [f"iptables, table {table}, chain {chain}: {text}: {done}"]


@pytest.mark.parametrize(("chain", "text"), OPENINGS)
def test_rules_for_openings_are_not(chain: str, text: str) -> None:
    """Rules for opening packets are not named: fast forward begins after a flow has been
    answered.
    """
    assert not found(chain, text)


def test_what_comes_after_established_connections_were_accepted_is_not() -> None:
    """Rules after the acceptance of established connections never see these, with or without
    --fast-forward.
    """
    accept = "-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT"
    assert not found("FORWARD", accept, "-j LOG")
    assert found("FORWARD", f"-s 192.0.2.0/24 {accept}", "-j LOG")


JUMPS = [
    ("-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", ["-j before", "-j LOG"], 0),
    ("-m conntrack --ctstate RELATED,ESTABLISHED -j RETURN", ["-j before", "-j LOG"], 1),
    ("-m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", ["-i eth0 -j before", "-j LOG"], 1),
    ("-j LOG", ["-m conntrack --ctstate NEW -j before"], 0),
    ("-j LOG", ["-m limit --limit 1/sec -j before"], 2),
]


@pytest.mark.parametrize(("before", "texts", "count"), JUMPS)
def test_chains_that_others_jump_to_count(before: str, texts: list[str], count: int) -> None:
    """ufw's and firewalld's rules accept established connections in such a chain."""
    assert len(found("FORWARD", *texts, before=before)) == count


def test_a_policy_that_drops() -> None:
    """It is named unless a rule accepts all packets of established connections."""
    accept = "-A FORWARD {}-m conntrack --ctstate ESTABLISHED -j ACCEPT\n"
    for rule, count in ((accept.format("-i eth0 "), 1), (accept.format(""), 0)):
        saved = f"*filter\n:FORWARD DROP [0:0]\n{rule}COMMIT\n"
        lines = [line for each in of_iptables(saved, "iptables") for line in each_packet(each)]
        policy = "iptables, table filter, chain FORWARD: its policy drops what no rule accepts"
        assert lines == [policy] * count


# The beginning of what these programs write, and the rules that open connections would bypass.
CALICO = """*raw
:PREROUTING ACCEPT [0:0]
:cali-PREROUTING - [0:0]
-A PREROUTING -j cali-PREROUTING
-A cali-PREROUTING -i cali+ -j MARK --set-xmark 0x40000/0x40000
-A cali-PREROUTING -m mark --mark 0x40000/0x40000 -m rpfilter --validmark --invert -j DROP
COMMIT
*filter
:FORWARD ACCEPT [0:0]
:cali-FORWARD - [0:0]
:cali-from-wl-dispatch - [0:0]
:cali-fw-cali1 - [0:0]
-A FORWARD -j cali-FORWARD
-A cali-FORWARD -i cali+ -j cali-from-wl-dispatch
-A cali-from-wl-dispatch -i cali1 -g cali-fw-cali1
-A cali-from-wl-dispatch -m comment --comment "Unknown interface" -j DROP
-A cali-fw-cali1 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A cali-fw-cali1 -m conntrack --ctstate INVALID -j DROP
-A cali-fw-cali1 -m set --match-set cali40s:1 src -j MARK --set-xmark 0x10000/0x10000
-A cali-fw-cali1 -m comment --comment "Drop if no profiles matched" -j DROP
COMMIT
"""
KUBE_ROUTER = """*filter
:FORWARD ACCEPT [0:0]
:KUBE-ROUTER-FORWARD - [0:0]
:KUBE-POD-FW-A - [0:0]
-A FORWARD -j KUBE-ROUTER-FORWARD
-A KUBE-ROUTER-FORWARD -d 10.244.1.5/32 -j KUBE-POD-FW-A
-A KUBE-ROUTER-FORWARD -m mark --mark 0x20000/0x20000 -j ACCEPT
-A KUBE-POD-FW-A -m conntrack --ctstate INVALID -j DROP
-A KUBE-POD-FW-A -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
-A KUBE-POD-FW-A -m set --match-set KUBE-SRC-A src -j MARK --set-xmark 0x10000/0x10000
-A KUBE-POD-FW-A -m mark ! --mark 0x10000/0x10000 -m limit --limit 10/min -j NFLOG
-A KUBE-POD-FW-A -m mark ! --mark 0x10000/0x10000 -j REJECT
COMMIT
"""
FAIL2BAN = """*filter
:INPUT ACCEPT [0:0]
:FORWARD ACCEPT [0:0]
:f2b-web - [0:0]
-A {} -p tcp -m multiport --dports 80,443 -j f2b-web
-A f2b-web {}-j REJECT
-A f2b-web -j RETURN
COMMIT
"""
BANNED, BANNED_SET = "-s 192.0.2.7/32 ", "-m set --match-set f2b-web src "
SHAPES = {
    "Calico": (CALICO, 2),
    "kube-router": (KUBE_ROUTER, 0),
    "fail2ban at INPUT": (FAIL2BAN.format("INPUT", BANNED), 0),
    "fail2ban at FORWARD": (FAIL2BAN.format("FORWARD", BANNED), 1),
    "fail2ban with an ipset": (FAIL2BAN.format("FORWARD", BANNED_SET), 1),
}


@pytest.mark.parametrize(("saved", "count"), SHAPES.values(), ids=SHAPES)
def test_rules_of_other_programs(saved: str, count: int) -> None:
    """Those that drop before they accept established connections are named, and no others."""
    lines = [line for each in of_iptables(saved, "iptables") for line in each_packet(each)]
    assert [line.endswith(CAN_DROP) for line in lines] == [True] * count


NETWORK_POLICIES = """{"nftables": [
    {"table": {"family": "inet", "name": "kube-network-policies", "handle": 1}},
    {"set": {"family": "inet", "name": "podips-v4", "table": "kube-network-policies",
        "type": "ipv4_addr", "handle": 5, "elem": ["10.244.1.5"]}},
    {"chain": {"family": "inet", "table": "kube-network-policies", "name": "postrouting",
        "handle": 2, "type": "filter", "hook": "postrouting", "prio": 95, "policy": "accept"}},
    {"rule": {"family": "inet", "table": "kube-network-policies", "chain": "postrouting",
        "handle": 3, "expr": [
        {"match": {"op": "in", "left": {"ct": {"key": "state"}},
            "right": ["established", "related"]}}, {"accept": null}]}},
    {"rule": {"family": "inet", "table": "kube-network-policies", "chain": "postrouting",
        "handle": 4, "expr": [
        {"match": {"op": "==", "left": {"payload": {"protocol": "ip", "field": "saddr"}},
            "right": "@podips-v4"}}, {"queue": {"num": 100, "flags": "bypass"}}]}}
]}"""


def test_a_policy_by_a_queue() -> None:
    """kube-network-policies' rule is named, though established connections do not meet it."""
    assert list(each_packet(read_nft(NETWORK_POLICIES))) == [
        "table inet kube-network-policies, chain postrouting: handle 4: queues packets"
    ]


@pytest.mark.parametrize(("chain", "text"), INVALID)
def test_rules_for_invalid_packets_are_named(chain: str, text: str) -> None:
    """A rule asks for them by name, in a list, or by excluding other states."""
    assert found(chain, text, lines=for_invalid) == [
        f"iptables, table filter, chain {chain}: {text}: asks for ct state invalid"
    ]


@pytest.mark.parametrize(("chain", "text"), NOT_INVALID)
def test_other_rules_are_not_for_invalid_packets(chain: str, text: str) -> None:
    """Other states, their exclusion, comments and ipsets do not ask for them."""
    assert not found(chain, text, lines=for_invalid)
