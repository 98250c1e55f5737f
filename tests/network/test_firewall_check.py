# SPDX-License-Identifier: Apache-2.0
"""`ebpflb check` names rules that miss what ebpflb translates, and no rule that matches it."""

import json
import re
import subprocess
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from ebpflb.tools.firewall.survey import FirewallSurvey, survey
from tests.kernel.node import nodes
from tests.kit import requests
from tests.kit.lab_cluster import TARGET
from tests.kit.parameters import both_engines
from tests.kit.two_nodes import Frontends, TwoNodes

WEB, FAR = Frontends(10), Frontends(20)
HOOKS = {
    "raw": "type filter hook prerouting priority -300",
    "mangle": "type filter hook prerouting priority -150",
    "dstnat": "type nat hook prerouting priority -100",
    "input": "type filter hook input priority 0",
    "forward": "type filter hook forward priority 0",
    "rawout": "type filter hook output priority -300",
    "output": "type filter hook output priority 0",
    "postrouting": "type filter hook postrouting priority -150",
}
TO_SERVICES = ("nodeport", "balancer", "cluster")
BY_CONNTRACK = {
    "status": "ct status dnat",
    "original": f"ct original ip daddr {WEB.balancer[0]}",
    "original6": f"ct original ip6 daddr {WEB.balancer[1]}",
    "reply": "ct reply ip saddr 10.244.1.11",
    "mark": "meta mark & 0x4000 == 0x4000",
    "endpoint": f"ip daddr 10.244.1.11 tcp dport {TARGET}",
    "endpoint6": f"ip6 daddr fd00:244:1::11 tcp dport {TARGET}",
}


pytestmark = both_engines


@pytest.fixture(scope="module", autouse=True)
def services(two: TwoNodes) -> None:
    two.publish(
        two.service("web", 10, two.here, externalTrafficPolicy="Local"),
        two.service("far", 20, two.there),
    )


class Case(NamedTuple):
    """A rule that counts: its chain, what it matches, and its name."""

    hook: str
    match: str

    @property
    def name(self) -> str:
        return f"{self.hook}: {self.match}"


def cases() -> Iterator[Case]:
    """At every hook rules that name the services; in FORWARD those by conntrack and endpoint."""
    for hook in HOOKS:
        for protocol in ("tcp", "udp"):
            yield Case(hook, f"{protocol} dport {WEB.nodeport}")
        for kind in TO_SERVICES[1:]:
            v4, v6 = getattr(WEB, kind)
            yield Case(hook, f"ip daddr {v4} tcp dport 80")
            yield Case(hook, f"ip6 daddr {v6} udp dport 80")
    for match in BY_CONNTRACK.values():
        yield Case("forward", match)


def ask(two: TwoNodes) -> None:
    """Clients outside ask the NodePort and the balancer, a pod and the node the cluster IP. A
    request to the other service is masqueraded, so it has the mark.
    """
    outside, pod, host = map(two.sockets, (two.outside, two.hooked, two.near))
    assert requests.tcp(outside, *FAR.to("nodeport", two.near)).name == "there"
    for v6 in (False, True):
        for send in (requests.tcp, requests.udp):
            for kind in ("nodeport", "balancer"):
                assert send(outside, *WEB.to(kind, two.near, v6=v6)).name == "here"
            for kind in TO_SERVICES:
                assert send(host, *WEB.to(kind, two.near, v6=v6)).name == "here"
            assert send(pod, *WEB.to("cluster", two.near, v6=v6)).name == "here"


def checked(two: TwoNodes) -> FirewallSurvey:
    """What `ebpflb check` says of the rules on the node."""
    with nodes.entered(two.near.netns):
        return survey(two.agents[0].paths.state)


@pytest.mark.extended
def test_named_rules_do_not_match(two: TwoNodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rules that name Services, those are named that count none of their requests, but would
    with kube-proxy: before its NAT, and by conntrack's original address.
    """
    monkeypatch.setattr("ebpflb.tools.firewall.survey.MOST_SHOWN", 1000)
    chains = "\n".join(
        f"chain {hook} {{\n{kind};\n"
        + "\n".join(f'{c.match} counter comment "{c.name}"' for c in cases() if c.hook == hook)
        + "\n}"
        for hook, kind in HOOKS.items()
    )
    two.near.nft(f"table inet lab_case {{\n{chains}\n}}\n")
    try:
        found = checked(two)
        named = {
            name for line in found.named or () for name in re.findall(r'handle \d+ "(.*)":', line)
        }
        ask(two)
        command = [*two.near.enter, "nft", "-j", "list", "table", "inet", "lab_case"]
        listed = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    finally:
        two.near.nft("delete table inet lab_case")
    assert not found.unread
    rules = [o["rule"] for o in listed["nftables"] if "rule" in o]
    counts = {
        r["comment"]: e["counter"]["packets"] for r in rules for e in r["expr"] if "counter" in e
    }
    assert counts.keys() == {case.name for case in cases()}
    silent = {name for name, count in counts.items() if not count}
    before_nat = {name for name in silent if name.startswith(("raw", "mangle", "dstnat"))}
    assert named == before_nat | {name for name in silent if "ct original" in name}
    assert 0 < len(named) < len(counts)
