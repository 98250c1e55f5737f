# SPDX-License-Identifier: Apache-2.0
"""What rules before another one, and hooks that are not compared, make of findings."""

import pytest

from ebpflb.diagnose.firewall import iptables_parser, nft_parser
from ebpflb.diagnose.firewall.rule_search import RuleSearch, Why
from ebpflb.diagnose.firewall.rules import FirewallTable
from ebpflb.diagnose.firewall.service_traffic import Traffic
from ebpflb.model.packet_path import Engine
from tests.diagnose.firewall.services import SERVICES, node

FLOWS = node(Engine.FLOWS)
NODEPORT, POD, PODS = "-p tcp --dport 30080", "-d 10.244.1.11/32", "-d 10.244.1.8/30"
DROP_PODS = f"{PODS} -j DROP"
CASES = {
    # rules before the last one; what becomes of the last one on flows
    "nothing before": ([], DROP_PODS, Why.DROPPED),
    "accepted before it": ([f"{POD} -j ACCEPT"], DROP_PODS, None),
    "left before it": ([f"{POD} -j RETURN"], DROP_PODS, None),
    "dropped before it": ([f"{POD} -j DROP"], DROP_PODS, None),
    "another address accepted": (["-d 10.244.9.9/32 -j ACCEPT"], DROP_PODS, Why.DROPPED),
    "only from one device": ([f"-i eth1 {POD} -j ACCEPT"], DROP_PODS, Why.DROPPED),
    "only in some states": (
        [f"{POD} -m conntrack --ctstate NEW -j ACCEPT"],
        DROP_PODS,
        Why.DROPPED,
    ),
    "counted only": ([f"{POD} -m comment --comment seen"], DROP_PODS, Why.DROPPED),
    "accepted formerly": (
        [f"-d 192.0.2.1/32 {NODEPORT} -j ACCEPT", "-d 203.0.113.10/32 -j ACCEPT"],
        "! -d 127.0.0.0/8 -j DROP",
        Why.DROPPED,
    ),
    "never came so far": (["! -d 127.0.0.0/8 -j ACCEPT"], f"{NODEPORT} -j DROP", None),
    "another one missed it": ([f"{NODEPORT} -j ACCEPT"], f"{NODEPORT} -j DROP", Why.LOST),
}


def chains(rules: list[str], last: str, policy: str = "ACCEPT") -> list[FirewallTable]:
    every = "".join(f"-A PREROUTING {rule}\n" for rule in [*rules, last])
    saved = f"*raw\n:PREROUTING {policy} [0:0]\n:OTHER - [0:0]\n{every}COMMIT\n"
    return iptables_parser.parse(saved, "iptables-legacy")


def judged(there: list[FirewallTable], last: str) -> Why | None:
    """What is found of the rule with this text; None: nothing."""
    made = RuleSearch(Traffic(SERVICES, FLOWS), FLOWS)
    made.add(there)
    return next((each.why for each in made.findings if each.rule.where == last), None)


@pytest.mark.parametrize(("rules", "last", "expected"), CASES.values(), ids=CASES)
def test_rules_before_it(rules: list[str], last: str, expected: Why | None) -> None:
    """A rule counts for what comes so far; only those end the chain of which that is certain."""
    assert judged(chains(rules, last), last) is expected


def test_rules_before_a_jump() -> None:
    """What has been accepted before the jump does not come to the chain."""
    jump = ["-j OTHER", f"{POD} -j ACCEPT"]
    for order, expected in ((jump, Why.DROPPED), (jump[::-1], None)):
        (table,) = chains(order[:-1], order[-1])
        table.chains["OTHER"].rules = chains([], DROP_PODS)[0].chains["PREROUTING"].rules
        assert judged([table], DROP_PODS) is expected


@pytest.mark.parametrize(
    ("after", "policy", "expected"),
    [("-j DROP", "ACCEPT", Why.ACCEPTED), ("-j OTHER", "DROP", Why.ACCEPTED), ("", "ACCEPT", None)],
)
def test_accepted_before_what_drops(after: str, policy: str, expected: Why | None) -> None:
    """A rule that lets pods' packets pass lets requests to NodePorts pass before all is dropped."""
    accept = f"{PODS} -j ACCEPT"
    assert judged(chains([accept], after or "-j ACCEPT", policy), accept) is expected


NFT = """
{"nftables": [
 {"table": {"family": "%(family)s", "name": "t", "handle": 1}},
 {"chain": {"family": "%(family)s", "table": "t", "name": "c", "handle": 1, "type": "filter",
            "hook": "%(hook)s", "prio": -300, "policy": "accept"}},
 {"rule": {"family": "%(family)s", "table": "t", "chain": "c", "handle": 2, "expr": [
   {"match": {"op": "==", "left": {"payload": {"protocol": "tcp", "field": "dport"}},
              "right": 30080}}, {"drop": null}]}}]}
"""


@pytest.mark.parametrize(
    ("family", "hook", "named"),
    [
        ("bridge", "prerouting", True),
        ("bridge", "forward", True),
        ("netdev", "egress", True),
        ("netdev", "ingress", False),
        ("inet", "prerouting", False),
    ],
)
def test_hooks_that_are_not_compared_are_named(family: str, hook: str, named: bool) -> None:
    """Rules of bridges and at egress are not judged, and that is said; others are judged."""
    made = RuleSearch(Traffic(SERVICES, FLOWS), FLOWS)
    made.add(nft_parser.parse((NFT % {"family": family, "hook": hook}).encode()))
    assert made.unjudged == ([f"table {family} t, chain c"] if named else [])
    assert bool(made.findings) is not named
