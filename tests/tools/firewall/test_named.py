# SPDX-License-Identifier: Apache-2.0
"""The rules that drop outside clients' requests to Services, on each engine."""

import json
import re

import pytest

from ebpflb.kernel.netfilter.firewall import Table, read_nft
from ebpflb.tools.firewall import Search
from tests.tools.firewall.services import WAYS, of_iptables, search, services

RAW = "raw\n-A PREROUTING"
MANGLE = "mangle\n-A PREROUTING"
NODEPORT = "-p tcp -m tcp --dport 30080"
SHARED = "raw\n-A PREROUTING -j EDGE\n-A EDGE"
NAMED = [
    (f"{RAW} {NODEPORT} -j DROP", "NodePort 30080"),
    (f"{RAW} -i eth0 {NODEPORT} -j DROP", "NodePort 30080"),
    (f"{RAW} -d 192.0.2.1/32 -p tcp -j DROP", "NodePort 30080"),
    (f"{MANGLE} {NODEPORT} -j DROP", "NodePort 30080"),
    (f"{RAW} -p tcp -m multiport --dports 30000:32767 -j DROP", "NodePort 30080"),
    (f"{RAW} -d 203.0.113.0/24 -j DROP", "203.0.113.10:80"),
    (f"{RAW} -p udp -m udp --dport 53 -j DROP", "203.0.113.10:53"),
    (f"{SHARED} {NODEPORT} -j DROP", "NodePort 30080"),
]
NOT_NAMED = [
    f"{RAW} -p tcp -m tcp --dport 22 -j DROP",
    f"{RAW} -p udp -m udp --dport 30080 -j DROP",
    f"{RAW} -i docker0 {NODEPORT} -j DROP",
    f"{RAW} -s 198.51.100.0/24 {NODEPORT} -j DROP",
    f"{RAW} -m set --match-set banned src {NODEPORT} -j DROP",
    f"{RAW} -m limit --limit 9/sec {NODEPORT} -j DROP",
    f"{RAW} {NODEPORT} -j ACCEPT",
    f"{RAW} {NODEPORT} -j ACCEPT\n-A PREROUTING {NODEPORT} -j DROP",
    f"{RAW} ! -s 198.51.100.0/24 {NODEPORT} -j DROP",
    f"filter\n-A INPUT {NODEPORT} -j DROP",
    f"{RAW} -d 10.244.1.11/32 -j DROP",
]
HOOKS = ("PREROUTING", "INPUT", "FORWARD", "OUTPUT", "POSTROUTING")


def with_rules(rules: str) -> list[Table]:
    """Load a table from text: "TABLE", a line end, and rules; chains are made as needed."""
    table, *texts = rules.splitlines()
    chains = dict.fromkeys(word for text in texts for word in re.findall(r"-[Aj] (\S+)", text))
    heads = [f":{name} {'ACCEPT' if name in HOOKS else '-'} [0:0]" for name in chains]
    return of_iptables("\n".join([f"*{table}", *heads, *texts, "COMMIT", ""]))


@pytest.mark.parametrize(("rule", "title"), NAMED)
def test_a_rule_that_drops_requests(rule: str, title: str) -> None:
    """One line names the rule, its chain and the first frontend that it drops, before netfilter's
    NAT.
    """
    table, *texts = rule.split("\n")
    (found,) = search(with_rules(rule), services())
    _, chain, shown = texts[-1].split(" ", 2)
    said = f"iptables-nft, table {table}, chain {chain}: {shown}: drops requests to {title} ("
    assert found.startswith(said)
    if "53" not in rule:  # which is the endpoint's port too
        assert not search(with_rules(rule), services(early=True))


@pytest.mark.parametrize("rule", NOT_NAMED)
def test_other_rules(rule: str) -> None:
    """A rule for some clients or other traffic is not named, because its author intends it."""
    assert not search(with_rules(rule), services())


def test_long_rules_are_shortened() -> None:
    """A rule of iptables is shortened, because it may have thousands of characters."""
    ports = ",".join(str(30080 - number) for number in range(14))
    comment = f'-m comment --comment "{"x" * 240}"'
    rule = f"{RAW} {comment} -p tcp -m multiport --dports {ports} -j DROP"
    (found,) = search(with_rules(rule), services())
    assert len(found) < 300


@pytest.mark.parametrize(("match", "skipped"), [("web src,src", 0), ("web dst,dst", 1)])
def test_rules_by_an_ipset_of_destinations_are_counted(match: str, skipped: int) -> None:
    """Rules by an ipset are counted, because ipsets, which may have a Service's address, are not
    read.
    """
    (table,) = with_rules(f"{RAW} -m set --match-set {match} -j DROP")
    made = Search(services(), WAYS)
    assert not list(made.named(table))
    assert made.unread == skipped


def of_nft(family: str, kind: str, hook: str, priority: int, *statements: object) -> Table:
    """Return a chain with one rule, which drops."""
    place = {"family": family, "table": "t"}
    base = {"type": kind, "hook": hook, "prio": priority}
    rule = {**place, "chain": "c", "handle": 2, "expr": [*statements, {"drop": None}]}
    objects = [
        {"table": {"family": family, "name": "t"}},
        {"chain": {**place, "name": "c", **base}},
        {"rule": rule},
    ]
    return read_nft(json.dumps({"nftables": objects}))


def is_port(number: int) -> dict[str, object]:
    left = {"payload": {"protocol": "tcp", "field": "dport"}}
    return {"match": {"op": "==", "left": left, "right": number}}


@pytest.mark.parametrize(
    ("hook", "priority", "port", "is_named"),
    [
        (("inet", "filter", "prerouting"), -111, 30080, True),
        (("inet", "filter", "prerouting"), -109, 30080, False),
        (("inet", "filter", "prerouting"), -109, 8080, True),
        (("inet", "filter", "prerouting"), -300, 80, True),
        (("inet", "filter", "forward"), 0, 8080, False),
        (("netdev", "filter", "ingress"), -500, 30080, True),
        (("netdev", "filter", "egress"), -500, 30080, False),
        (("bridge", "filter", "prerouting"), -300, 30080, False),
    ],
)
def test_requests_have_the_endpoints_port_after_nat(
    hook: tuple[str, str, str], priority: int, port: int, is_named: bool
) -> None:
    """On netfilter requests have the endpoint's port after our own NAT; bridges are left out."""
    family, kind, name = hook
    assert (
        bool(search([of_nft(family, kind, name, priority, is_port(port))], services())) is is_named
    )
