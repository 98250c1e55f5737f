# SPDX-License-Identifier: Apache-2.0
"""Recorded rules are found, or not, as their comments say: on flows, and on netfilter."""

import re
from collections.abc import Iterator

import pytest

from ebpflb.diagnose.firewall import iptables_parser
from ebpflb.diagnose.firewall.rule_search import Finding, RuleSearch, Why
from ebpflb.diagnose.firewall.rules import FirewallTable
from ebpflb.diagnose.firewall.service_traffic import Traffic
from ebpflb.diagnose.firewall.survey import tables
from ebpflb.model.packet_mark import PacketMark
from ebpflb.model.packet_path import Engine
from ebpflb.node.rulesets import Printed
from tests.diagnose.firewall.services import RECORDED, SERVICES, node, search

WORDS = {"-": None, "lost": Why.LOST, "dropped": Why.DROPPED}
COMMENT = re.compile(r'"(-|lost|dropped) (-|lost|dropped)(?=["\s])')
engines = pytest.mark.parametrize("engine", list(Engine))


def nft_tables() -> list[FirewallTable]:
    return saved("nft")


def saved(tool: str) -> list[FirewallTable]:
    """Each rule as if no other were before it: they are many for one service in one chain."""
    name = f"{tool}.{'json' if tool == 'nft' else 'save'}"
    notes: list[str] = []
    found = list(tables([Printed(tool, (RECORDED / name).read_bytes())], notes))
    assert not notes
    for table in found:
        for chain in table.chains.values():
            chain.rules = [rule._replace(ends=False) for rule in chain.rules]
    return found


def said(there: list[FirewallTable], engine: Engine) -> Iterator[tuple[str, Why | None]]:
    """Each rule with a comment, and what the comment says of it."""
    for table in there:
        for chain in table.chains.values():
            for rule in chain.rules:
                found = COMMENT.search(rule.where)
                if found:
                    word = found.group(1 + (engine is Engine.NETFILTER))
                    yield f"{chain.name}: {rule.where}", WORDS[word]


def found(findings: list[Finding]) -> dict[str, Why]:
    return {f"{each.chain}: {each.rule.where}": each.why for each in findings}


@engines
@pytest.mark.parametrize("tool", ["nft", "iptables-legacy", "iptables-nft"])
def test_rules_are_found_as_recorded(tool: str, engine: Engine) -> None:
    """What each rule's comment says, and no rule without a comment."""
    there = saved(tool)
    expected = dict(said(there, engine))
    assert len(expected) > 25
    assert found(search(there, node(engine))) == {k: why for k, why in expected.items() if why}


def test_packet_mark_is_accepted() -> None:
    """A rule by the mark of --packet-mark matches, and with it what would be dropped passes."""
    marked = node(Engine.FLOWS, mark=PacketMark(0x4000, 0x4000))
    before = found(search(nft_tables(), node(Engine.FLOWS)))
    after = found(search(nft_tables(), marked))
    assert not [where for where in after if "mark" in where]
    assert {where: why for where, why in after.items() if "30080" in where} == {
        where: why for where, why in before.items() if "30080" in where
    }


def test_pods_that_are_translated_at_their_device() -> None:
    """With --socket-translation=host and netfilter a rule for a cluster IP sees it before NAT."""
    there = found(search(nft_tables(), node(Engine.NETFILTER)))
    host = found(search(nft_tables(), node(Engine.NETFILTER, host_sockets=True)))
    gone = {where.partition(":")[0] for where in there.keys() - host.keys()}
    assert gone == {"early", "forward"}
    assert all(why is not Why.DROPPED for why in host.values())


MESH = """*nat
:OUTPUT ACCEPT [0:0]
:ISTIO_OUTPUT - [0:0]
:ISTIO_REDIRECT - [0:0]
-A OUTPUT -p tcp -j ISTIO_OUTPUT
-A ISTIO_OUTPUT -o lo -j RETURN
-A ISTIO_OUTPUT -d 127.0.0.1/32 -j RETURN
-A ISTIO_OUTPUT -j ISTIO_REDIRECT
-A ISTIO_REDIRECT -p tcp -j REDIRECT --to-ports 15001
COMMIT
*filter
:OUTPUT ACCEPT [0:0]
-A OUTPUT -d 10.96.0.10/32 -j DROP
-A OUTPUT -d 10.244.1.11/32 -j ACCEPT
-A OUTPUT -p tcp -m tcp --dport 80 -j ACCEPT
COMMIT
"""


@engines
def test_rules_in_pods(engine: Engine) -> None:
    """A mesh's redirection of everything, and rules for a service; not with host sockets."""
    there = iptables_parser.parse(MESH, "iptables-legacy")
    assert found(search(there, node(engine), in_pod=True)) == {
        "ISTIO_REDIRECT: -p tcp -j REDIRECT --to-ports 15001": Why.REDIRECTED,
        "OUTPUT: -d 10.96.0.10/32 -j DROP": Why.LOST,
    }
    assert not search(there, node(engine, host_sockets=True), in_pod=True)


NAT = """*nat
:PREROUTING ACCEPT [0:0]
:POSTROUTING ACCEPT [0:0]
-A PREROUTING -p tcp -m tcp --dport 30080 -j REDIRECT --to-ports 1
-A POSTROUTING -p tcp -m conntrack --ctstate DNAT -j MASQUERADE
COMMIT
*filter
:FORWARD DROP [0:0]
-A FORWARD -m mark --mark 0x4000/0x4000 -j ACCEPT
-A FORWARD -p tcp -m conntrack --ctorigdstport 30080 -j ACCEPT
COMMIT
"""


def test_services_that_the_flow_tables_keep() -> None:
    """On netfilter every rule sees what it sees beside kube-proxy, except chains of type nat in
    PREROUTING, which come later; but for the Services that need the flow tables.
    """
    there = iptables_parser.parse(NAT, "iptables-legacy")
    at = node(Engine.NETFILTER)
    redirected = "-p tcp -m tcp --dport 30080 -j REDIRECT --to-ports 1"
    assert [each.rule.where for each in search(there, at)] == [redirected]
    counted = [each._replace(needs_flows=True) for each in SERVICES]
    made = RuleSearch(Traffic(counted, at), at)
    made.add(there)
    assert found(made.findings) == found(search(there, node(Engine.FLOWS)))
    assert len(made.findings) == 4
