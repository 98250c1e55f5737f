# SPDX-License-Identifier: Apache-2.0
"""Which rules are named, on each engine, and what to do instead."""

import json
import re
from collections.abc import Iterator

import pytest

from ebpflb.kernel.netfilter.rulesets import Printed
from ebpflb.model.packet_path import Engine
from ebpflb.tools.firewall.missed import Frontends, Missed, Search, unjudged
from ebpflb.tools.firewall.rules import Table, addresses, ports
from ebpflb.tools.firewall.survey import tables
from tests.tools.firewall.services import RECORDED, SERVICES, chain, node, search

FLOWS, NETFILTER = node(Engine.FLOWS), node(Engine.NETFILTER)
COMMENT = re.compile(r'"(-|lost|dropped) (-|lost|dropped)(?=["\s])')
engines = pytest.mark.parametrize("engine", list(Engine))


def recorded(tool: str) -> list[Table]:
    name = f"{tool}.{'json' if tool == 'nft' else 'save'}"
    notes: list[str] = []
    found = list(tables([Printed(tool, (RECORDED / name).read_bytes())], notes))
    assert not notes
    return found


def said(there: list[Table], engine: Engine) -> Iterator[tuple[tuple[str, str], str]]:
    """Each rule with a comment, and what the comment says of it."""
    for table in there:
        for each in table.chains.values():
            for rule in each.rules:
                if words := COMMENT.search(rule.text):
                    yield (each.name, rule.text), words.group(1 + (engine is Engine.NETFILTER))


def named(found: list[Missed]) -> dict[tuple[str, str], str]:
    """What is said of each rule, by chain and text."""
    words = {"may not match": "lost", "may drop": "dropped"}
    return {
        (chain(each), each.rule): next(words[part] for part in words if part in each.says)
        for each in found
    }


@engines
@pytest.mark.parametrize("tool", ["nft", "iptables-legacy", "iptables-nft"])
def test_rules_are_named_as_recorded(tool: str, engine: Engine) -> None:
    """What each rule's comment says, and no rule without a comment."""
    there = recorded(tool)
    expected = dict(said(there, engine))
    assert len(expected) > 25
    found = named(search(there, node(engine)))
    assert found == {where: word for where, word in expected.items() if word != "-"}


def test_with_packet_mark_rules_by_nat_are_not_named() -> None:
    """Nor rules that drop: rules by the mark are to come before them. Those by address are."""
    marked = node(Engine.FLOWS, packet_mark=True)
    before, after = (named(search(recorded("nft"), at)) for at in (FLOWS, marked))
    gone = {key: word for key, word in before.items() if key not in after}
    assert after == {key: word for key, word in before.items() if key not in gone}
    assert "lost" in gone.values()
    assert "dropped" not in after.values()
    assert {where for (where, _), word in gone.items() if word == "lost"} == {"forward", "leave"}


def test_pods_that_are_translated_at_their_device() -> None:
    """With --socket-translation=host and netfilter a rule for a cluster IP sees what pods send."""
    host = node(Engine.NETFILTER, host_sockets=True)
    there, then = (named(search(recorded("nft"), at)) for at in (NETFILTER, host))
    assert {where for where, _ in there.keys() - then.keys()} == {"early", "forward"}
    assert {where for where, _ in then} == {"send", "translate"}


def of_iptables(rules: str, sets: str = "") -> list[Table]:
    """Of "TABLE", a line end, and rules; chains are made."""
    table, *texts = rules.splitlines()
    chains = dict.fromkeys(word for text in texts for word in re.findall(r"-[Aj] (\S+)", text))
    heads = [f":{name} {'ACCEPT' if name in HOOKS else '-'} [0:0]" for name in chains]
    saved = "\n".join([f"*{table}", *heads, *texts, "COMMIT", ""])
    printed = [Printed("iptables-nft", saved.encode()), Printed("ipset", sets.encode())]
    notes: list[str] = []
    found = list(tables(printed, notes))
    assert not notes
    return found


HOOKS = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")
PREROUTING, FORWARD = "raw\n-A PREROUTING", "filter\n-A FORWARD"
NODEPORT, LOCAL = "-p tcp -m tcp --dport 30080", "-m addrtype --dst-type LOCAL"
DNAT, MARK = "-m conntrack --ctstate DNAT", "-m mark --mark 0x4000/0x4000"
TO_OTHER = "-j REDIRECT --to-ports 1"
BY_CLIENT = "ip rule add iif <pod's device> to <clients> lookup main"
REMEDIES = [
    ("flows", f"{PREROUTING} {NODEPORT} -j DROP", "--nodeport-source-ranges or NetworkPolicy"),
    ("flows", f"{PREROUTING} {NODEPORT} -j DROP", "in FORWARD, or --packet-path=netfilter"),
    ("flows", f"{PREROUTING} -d 203.0.113.10/32 -j DROP", "loadBalancerSourceRanges"),
    ("flows", f"{PREROUTING} -d 10.96.0.10/32 -j DROP", "--socket-translation=host and --packet"),
    ("netfilter", f"{PREROUTING} -d 10.96.0.10/32 -j DROP", "or --socket-translation=host"),
    ("flows", f"{PREROUTING} -d 10.244.1.11/32 -j DROP", "accept packets with the mark"),
    ("flows", f"{FORWARD} {DNAT} -j ACCEPT", "--packet-mark, and a rule"),
    ("flows", f"{FORWARD} {MARK} -j ACCEPT", "or --packet-path=netfilter"),
    ("flows", f"{FORWARD} -d 203.0.113.10/32 -j DROP", "as with kube-proxy"),
    ("flows", "filter\n-A OUTPUT -d 10.96.0.10/32 -j DROP", "sockets are connected to it"),
    ("netfilter", "filter\n-A OUTPUT -d 10.96.0.10/32 -j DROP", "sockets are connected to it"),
    ("flows", f"nat\n-A PREROUTING -d 203.0.113.10/32 {TO_OTHER}", "that no service has"),
    ("netfilter", f"nat\n-A PREROUTING -d 203.0.113.10/32 {TO_OTHER}", "handled first"),
    ("flows", f"nat\n-A POSTROUTING {DNAT} -j MASQUERADE", "--packet-path=netfilter"),
    ("flows", f"mangle\n-A PREROUTING {NODEPORT} -j TPROXY --on-port 1", "handled first"),
    ("flows", f"{FORWARD} --ctorigdst 203.0.113.10 -m mark --mark 0x8/0x8 -j DROP", "that mark"),
    ("flows", f"mangle\n-A PREROUTING {LOCAL} -j CONNMARK --set-xmark 0x80/0x80", BY_CLIENT),
    ("flows", f"mangle\n-A PREROUTING {LOCAL} -j MARK --set-xmark 0x80/0x80", "--reply-path"),
]


@pytest.mark.parametrize(("engine", "rule", "wanted"), REMEDIES)
def test_what_to_do_instead(engine: str, rule: str, wanted: str) -> None:
    """A line that names the rule, and one with the options."""
    table, text = rule.split("\n")
    (found,) = search(of_iptables(rule), node(Engine(engine)))
    _, hook, shown = text.split(" ", 2)
    assert str(found).startswith(f"iptables-nft, table {table}, chain {hook}: {shown}: may ")
    assert wanted in found.remedy
    assert "\n" not in str(found) + found.remedy


@pytest.mark.parametrize("rule", dict.fromkeys(rule for _, rule, _ in REMEDIES))
def test_what_is_in_force_is_no_remedy(rule: str) -> None:
    """Neither the engine, where the flow tables keep Services, nor where sockets are translated."""
    in_force = node(Engine.NETFILTER, host_sockets=True)
    counted = [each._replace(by_flows=True) for each in SERVICES]
    (found,) = search(of_iptables(rule), in_force, services=counted)
    assert found.remedy
    assert "--packet-path" not in found.remedy
    assert "--socket-translation" not in found.remedy


def test_long_rules_are_shortened() -> None:
    """A rule of iptables may have thousands of characters."""
    ports = ",".join(str(30080 - number) for number in range(14))
    comment = f'-m comment --comment "{"x" * 240}"'
    rule = f"filter\n-A INPUT {comment} -p tcp -m multiport --dports {ports} -j ACCEPT"
    (found,) = search(of_iptables(rule), FLOWS)
    assert len(str(found)) < 300


MESH = """nat
-A OUTPUT -p tcp -j ISTIO_OUTPUT
-A ISTIO_OUTPUT -o lo -j RETURN
-A ISTIO_OUTPUT -d 127.0.0.1/32 -j RETURN
-A ISTIO_OUTPUT -d 169.254.0.1/32 -p tcp -j REDIRECT --to-ports 1
-A ISTIO_OUTPUT -j ISTIO_REDIRECT
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001
-A PREROUTING -p tcp -j REDIRECT --to-ports 15006
-A OUTPUT -d 10.96.0.10/32 -j DROP
-A OUTPUT -d 10.244.1.11/32 -j ACCEPT
-A OUTPUT -p tcp -m tcp --dport 80 -j ACCEPT"""


@engines
def test_rules_in_pods(engine: Engine) -> None:
    """A mesh's redirection of everything, and rules for a Service; not with host sockets."""
    there = of_iptables(MESH)
    assert {(chain(each), each.remedy) for each in search(there, node(engine), in_pod=True)} == {
        ("ISTIO_REDIRECT", "--socket-translation=host"),
        ("OUTPUT", "match the endpoint's address and port, or --socket-translation=host"),
    }
    assert not search(there, node(engine, host_sockets=True), in_pod=True)


def test_services_that_the_flow_tables_keep() -> None:
    """On netfilter rules for them are named as on flows."""
    counted = [each._replace(by_flows=True) for each in SERVICES]
    there = recorded("nft")
    assert named(search(there, NETFILTER, services=counted)) == named(search(there, FLOWS))


SETS = """create web hash:ip,port family inet
add web 203.0.113.10,tcp:80
create other hash:ip,port family inet
add other 203.0.113.11,tcp:81
create ports bitmap:port range 0-65535
add ports 30079
add ports 30080
create services hash:net family inet counters comment
add services 203.0.113.0/24 packets 0 bytes 0 comment "a, nomatch"
create excepted hash:net family inet
add excepted 203.0.113.10 nomatch
create device hash:net,iface family inet
add device 203.0.113.0/24,eth0
create empty hash:ip family inet
create clients hash:ip,port family inet
add clients 198.51.100.1,tcp:30080
create listed list:set size 8
add listed web
create strange hash:ip,port family inet
add strange nonsense,tcp:x
"""
MATCHES = [
    ("web dst,dst", "named"),
    ("web src,src", "not"),
    ("other dst,dst", "not"),
    ("ports dst", "named"),
    ("services dst", "named"),
    ("excepted dst", "not"),
    ("device dst,dst", "named"),
    ("empty dst", "not"),
    ("clients src,dst", "named"),
    ("listed dst,dst", "unread"),
    ("strange dst,dst", "unread"),
    ("missing dst", "unread"),
]


@pytest.mark.parametrize(("match", "expected"), MATCHES)
def test_ipsets(match: str, expected: str) -> None:
    """Rules are compared by the members that are destinations; others are counted."""
    (table,) = of_iptables(f"{PREROUTING} -m set --match-set {match} -j ACCEPT", SETS)
    made = Search(Frontends(SERVICES), FLOWS)
    found = list(made.missed(table))
    assert (len(found), made.skipped) == (expected == "named", expected == "unread")


def of_nft(family: str, kind: str, hook: str, priority: int, *statements: object) -> Table:
    """With one rule."""
    place = {"family": family, "table": "t"}
    base = {"type": kind, "hook": hook, "prio": priority}
    objects = [
        {"table": {"family": family, "name": "t"}},
        {"chain": {**place, "name": "c", **base}},
        {"rule": {**place, "chain": "c", "handle": 2, "expr": statements}},
    ]
    (table,) = tables([Printed("nft", json.dumps({"nftables": objects}).encode())], [])
    return table


def match(left: object, right: object, operator: str = "==") -> dict[str, object]:
    return {"match": {"op": operator, "left": left, "right": right}}


DPORT, STATUS = {"payload": {"protocol": "tcp", "field": "dport"}}, {"ct": {"key": "status"}}
DROP, FORWARDED = {"drop": None}, ("filter", "forward", 0)
WHICH = {
    "nat bits that are set": ((*FORWARDED, match({"&": [STATUS, "dnat"]}, 0, "!=")), "may not"),
    "nat bits that are not": ((*FORWARDED, match({"&": [STATUS, "dnat"]}, 0), DROP), "may drop"),
    "the other direction": (
        (*FORWARDED, match({"ct": {"key": "ip daddr", "dir": "reply"}}, "203.0.113.10")),
        "",
    ),
    "the source's type": (
        (
            *("filter", "prerouting", -300),
            match({"fib": {"result": "type", "flags": ["saddr"]}}, "local"),
            {"mangle": {"key": {"meta": {"key": "mark"}}, "value": 128}},
        ),
        "",
    ),
    "an external port before NAT": (("filter", "prerouting", -101, match(DPORT, 80)), "may not"),
    "an external port after NAT": (("filter", "prerouting", 0, match(DPORT, 80)), ""),
    "iptables": ((*FORWARDED, {"xt": {"type": "match", "name": "policy"}}), "unread"),
    "a form that is not known": ((*FORWARDED, {"match": 1}), "unread"),
}


@pytest.mark.parametrize(("rule", "expected"), WHICH.values(), ids=WHICH)
def test_one_rule_of_nft(rule: tuple[str, str, int, object], expected: str) -> None:
    """What it is about decides, on flows; one that cannot be read is counted."""
    made = Search(Frontends(SERVICES), FLOWS)
    found = [each.says[: len(expected)] for each in made.missed(of_nft("inet", *rule))]
    assert (found, made.skipped) == (
        [expected] if expected.startswith("may") else [],
        expected == "unread",
    )


@pytest.mark.parametrize("priority", [-111, -109])
def test_nat_before_and_behind_our_own(priority: int) -> None:
    """On netfilter a nat chain in PREROUTING is asked about a NodePort before our own alone."""
    found = search([of_nft("inet", "nat", "prerouting", priority, match(DPORT, 30080))], NETFILTER)
    assert bool(found) == (priority > -110)


def test_sctp_of_sockets_and_another_family() -> None:
    """SCTP is not translated at sockets; rules for IPv6 are not about Services of IPv4."""
    nodeport = SERVICES[0]
    for rule, service, is_named in (
        ("filter\n-A OUTPUT -p sctp -m sctp --dport 30080", nodeport._replace(protocol=132), False),
        ("raw\n-A PREROUTING -p sctp --dport 30080", nodeport._replace(protocol=132), True),
        ("filter\n-A OUTPUT -p tcp -m tcp --dport 30080", nodeport._replace(family=6), False),
    ):
        assert bool(search(of_iptables(rule), FLOWS, services=[service])) == is_named


def test_ranges() -> None:
    """Overlapping and adjacent ones are joined."""
    assert ports("80:90,22,85,91:95").pairs == [(22, 22), (80, 95)]
    assert addresses("10.0.0.0/8,10.1.0.0/16").pairs == addresses("10.0.0.0-10.255.255.255").pairs
    assert 0 not in addresses("")


@pytest.mark.parametrize(
    ("family", "hook", "is_compared"),
    [
        ("bridge", "prerouting", False),
        ("bridge", "forward", False),
        ("netdev", "egress", False),
        ("netdev", "ingress", True),
        ("inet", "prerouting", True),
    ],
)
def test_hooks_that_are_not_compared_are_named(family: str, hook: str, is_compared: bool) -> None:
    """Rules of bridges and at egress are not compared, and that is said; others are."""
    table = of_nft(family, "filter", hook, -300, match(DPORT, 30080), DROP)
    assert list(unjudged(table)) == ([] if is_compared else [f"table {family} t, chain c"])
    assert bool(search([table], FLOWS)) is is_compared
