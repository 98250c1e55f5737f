# SPDX-License-Identifier: Apache-2.0
"""Which rules name a Service and miss its requests, on each engine, and what to do instead."""

import json
import re
from collections.abc import Iterator

import pytest

from ebpflb.kernel.netfilter.firewall_reader import read_nft
from ebpflb.kernel.netfilter.firewall_rules import Table
from ebpflb.model.packet_path import Engine
from ebpflb.tools.firewall.survey import Search
from tests.tools.firewall.services import (
    DNS,
    FLOWS,
    NETFILTER,
    SETTINGS,
    WEB,
    frontend,
    of_iptables,
    recorded,
    search,
    services,
    where,
)

COMMENT = re.compile(r'"(-|lost) (-|lost)(?=["\s])')
engines = pytest.mark.parametrize("engine", list(Engine))


def said(there: list[Table], engine: Engine) -> Iterator[tuple[tuple[str, str], str]]:
    """Each rule with a comment, and what the comment says of it."""
    for table in there:
        for each in table.chains.values():
            for rule in each.rules:
                if words := COMMENT.search(rule.text):
                    yield (each.name, rule.text), words.group(1 + (engine is Engine.NETFILTER))


def named(found: list[str]) -> set[tuple[str, str]]:
    """The chain and text of each rule."""
    return set(map(where, found))


@engines
@pytest.mark.parametrize("tool", ["nft", "iptables-legacy", "iptables-nft"])
def test_rules_are_named_as_recorded(tool: str, engine: Engine) -> None:
    """What each rule's comment says, and no rule without a comment."""
    there = recorded(tool)
    expected = dict(said(there, engine))
    assert len(expected) > 25
    assert "lost" in expected.values()
    assert named(search(there, services(SETTINGS[engine]))) == {
        place for place, word in expected.items() if word == "lost"
    }


def test_pods_that_are_translated_at_their_device() -> None:
    """With --socket-translation=host and netfilter a rule for a cluster IP sees what pods send."""
    there, then = (
        named(search(recorded("nft"), services(settings)))
        for settings in (NETFILTER, NETFILTER | {"host_sockets"})
    )
    assert {chain for chain, _ in there - then} == {"early", "forward"}
    assert {chain for chain, _ in then} == {"send", "translate"}


def with_rules(rules: str) -> list[Table]:
    """Of "TABLE", a line end, and rules; chains are made."""
    table, *texts = rules.splitlines()
    chains = dict.fromkeys(word for text in texts for word in re.findall(r"-[Aj] (\S+)", text))
    heads = [f":{name} {'ACCEPT' if name in HOOKS else '-'} [0:0]" for name in chains]
    return of_iptables("\n".join([f"*{table}", *heads, *texts, "COMMIT", ""]))


HOOKS = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")
PREROUTING, FORWARD = "raw\n-A PREROUTING", "filter\n-A FORWARD"
NODEPORT = "-p tcp -m tcp --dport 30080"
TO_OTHER = "-j REDIRECT --to-ports 1"
ORIGINAL = "-m conntrack --ctorigdst 203.0.113.10"
MISSING = [
    ("flows", f"{PREROUTING} {NODEPORT} -j DROP"),
    ("flows", f"{PREROUTING} -d 203.0.113.10/32 -j DROP"),
    ("flows", f"{PREROUTING} -d 10.96.0.10/32 -j DROP"),
    ("netfilter", f"{PREROUTING} -d 10.96.0.10/32 -j DROP"),
    ("flows", f"{FORWARD} {ORIGINAL} -j ACCEPT"),
    ("flows", "raw\n-A OUTPUT -d 10.96.0.10/32 -j DROP"),
    ("netfilter", "raw\n-A OUTPUT -d 10.96.0.10/32 -j DROP"),
    ("flows", f"nat\n-A PREROUTING -d 203.0.113.10/32 {TO_OTHER}"),
    ("netfilter", f"nat\n-A PREROUTING -d 203.0.113.10/32 {TO_OTHER}"),
    ("flows", f"mangle\n-A PREROUTING {NODEPORT} -j TPROXY --on-port 1"),
]


@pytest.mark.parametrize(("engine", "rule"), MISSING)
def test_the_line_of_a_rule(engine: str, rule: str) -> None:
    """One line names the rule and its chain."""
    table, text = rule.split("\n")
    (found,) = search(with_rules(rule), services(SETTINGS[Engine(engine)]))
    _, hook, shown = text.split(" ", 2)
    assert found.startswith(f"iptables-nft, table {table}, chain {hook}: {shown}: may ")
    assert "\n" not in found


def test_long_rules_are_shortened() -> None:
    """A rule of iptables may have thousands of characters."""
    ports = ",".join(str(30080 - number) for number in range(14))
    comment = f'-m comment --comment "{"x" * 240}"'
    rule = f"raw\n-A PREROUTING {comment} -p tcp -m multiport --dports {ports} -j ACCEPT"
    (found,) = search(with_rules(rule), services(FLOWS))
    assert len(found) < 300


def test_services_that_the_flow_tables_keep() -> None:
    """On netfilter rules for them are named as on flows."""
    counted = services(NETFILTER, frozenset({"least_connections"}))
    there = recorded("nft")
    assert named(search(there, counted)) == named(search(there, services(FLOWS)))


@pytest.mark.parametrize(("match", "skipped"), [("web src,src", 0), ("web dst,dst", 1)])
def test_rules_by_an_ipset_of_destinations_are_counted(match: str, skipped: int) -> None:
    """Sets are not read: they may have a Service's address."""
    (table,) = with_rules(f"{PREROUTING} -m set --match-set {match} -j ACCEPT")
    made = Search(services(FLOWS))
    assert not list(made.named(table))
    assert made.unread == skipped


def of_nft(family: str, kind: str, hook: str, priority: int, *statements: object) -> Table:
    """With one rule."""
    place = {"family": family, "table": "t"}
    base = {"type": kind, "hook": hook, "prio": priority}
    objects = [
        {"table": {"family": family, "name": "t"}},
        {"chain": {**place, "name": "c", **base}},
        {"rule": {**place, "chain": "c", "handle": 2, "expr": statements}},
    ]
    return read_nft(json.dumps({"nftables": objects}))


def match(left: object, right: object, operator: str = "==") -> dict[str, object]:
    return {"match": {"op": operator, "left": left, "right": right}}


DPORT = {"payload": {"protocol": "tcp", "field": "dport"}}
DROP, FORWARDED = {"drop": None}, ("filter", "forward", 0)
ORIGINALLY = {"ct": {"key": "ip daddr", "dir": "original"}}
WHICH = {
    "the original address": ((*FORWARDED, match(ORIGINALLY, "203.0.113.10")), "named"),
    "the other direction": (
        (*FORWARDED, match({"ct": {"key": "ip daddr", "dir": "reply"}}, "203.0.113.10")),
        "not",
    ),
    "a NodePort before NAT": (("filter", "prerouting", -101, match(DPORT, 30080)), "named"),
    "a NodePort after NAT": (("filter", "prerouting", 0, match(DPORT, 30080)), "not"),
    "another port of a Service": (("filter", "prerouting", -101, match(DPORT, 80)), "not"),
    "iptables": (
        ("filter", "prerouting", -300, {"xt": {"type": "match", "name": "policy"}}),
        "unread",
    ),
    "a form that is not known": (("filter", "prerouting", -300, {"match": 1}), "unread"),
    "what cannot be read, after NAT": ((*FORWARDED, {"match": 1}), "not"),
}


@pytest.mark.parametrize(("rule", "expected"), WHICH.values(), ids=WHICH)
def test_one_rule_of_nft(rule: tuple[str, str, int, object], expected: str) -> None:
    """What it is about decides, on flows; one that cannot be read is counted."""
    made = Search(services(FLOWS))
    found = list(made.named(of_nft("inet", *rule)))
    assert (bool(found), made.unread) == (expected == "named", expected == "unread")


@pytest.mark.parametrize("priority", [-111, -109])
def test_nat_before_and_behind_our_own(priority: int) -> None:
    """On netfilter a nat chain in PREROUTING is asked about a NodePort before our own alone."""
    table = of_nft("inet", "nat", "prerouting", priority, match(DPORT, 30080))
    assert bool(search([table], services(NETFILTER))) == (priority > -110)


@pytest.mark.parametrize(
    ("rule", "settings", "is_named"),
    [
        ("raw\n-A OUTPUT -p sctp -m sctp --dport 30080", FLOWS, False),
        ("raw\n-A PREROUTING -p sctp --dport 30080", FLOWS, True),
        ("raw\n-A PREROUTING -p sctp --dport 30080", NETFILTER, True),
        ("raw\n-A PREROUTING -p sctp --dport 30080", NETFILTER | {"netfilter_sctp"}, False),
    ],
)
def test_sctp(rule: str, settings: frozenset[str], is_named: bool) -> None:
    """It is not translated at sockets, and by netfilter only where the kernel's NAT can."""
    service = frontend("NodePort", "", 30080, WEB, 132, settings=settings)
    assert bool(search(with_rules(rule), [service])) == is_named


@pytest.mark.parametrize(
    ("match", "is_named"),
    [
        ("-p udp -m multiport --dports 22,80:90", True),
        ("-p udp -m multiport --dports 22,81:90", False),
        ("-d 10.96.0.0/12 -p udp", True),
        ("-m iprange --dst-range 10.96.0.1-10.96.0.10 -p all", True),
        ("-m iprange --dst-range 10.96.0.11-10.96.0.20 -p all", False),
        ("-d 10.0.0.0/8 -p udp", False),
    ],
)
def test_ranges(match: str, is_named: bool) -> None:
    """A rule names what is in its ranges and networks, if the endpoint is not."""
    service = frontend("ClusterIP", "10.96.0.10", 53, DNS, 17)._replace(is_nodeport=True)
    service = service._replace(port=80, endpoint=(service.endpoint[0], 53))
    assert bool(search(with_rules(f"{PREROUTING} {match} -j DROP"), [service])) == is_named


@pytest.mark.parametrize(
    ("family", "hook", "is_compared"),
    [
        ("bridge", "prerouting", False),
        ("netdev", "egress", False),
        ("netdev", "ingress", True),
        ("inet", "prerouting", True),
    ],
)
def test_hooks_that_are_not_compared(family: str, hook: str, is_compared: bool) -> None:
    """Rules of bridges and at egress are left out."""
    table = of_nft(family, "filter", hook, -300, match(DPORT, 30080), DROP)
    assert bool(search([table], services(FLOWS))) is is_compared
