# SPDX-License-Identifier: Apache-2.0
"""Nodes are tested before requests are handed to them, on the wire (docs/client-addresses.md).

As test_hand_over.py; the switch may drop what a node sends from others' addresses.
"""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Lab
from ebpflb.model.packet_path import Engine
from ebpflb.serve import status
from tests.kernel.node import nodes
from tests.kit import handing_nodes, two_nodes
from tests.kit.forked import ForkedAgent
from tests.kit.handing_nodes import LOCAL, OPTIONS
from tests.kit.lab_cluster import PORT, started
from tests.kit.pod_networks import Routed

GUARD = """table bridge guard {{ chain c {{
    type filter hook forward priority 0;
    iifname "nodes{node}" ether type ip ip saddr != {v4} drop
    iifname "nodes{node}" ether type ip6 ip6 saddr != {{ {v6}, fe80::/10 }} drop
}}; }}"""
# Rules of the first node that drop what is for an address: how they come, and go.
_CHAIN = "chain c {{ type filter hook {} priority -300; ip daddr {} drop; }};"
_SET = f"set those {{ type ipv4_addr; elements = {{ {LOCAL[0]} }}; }};"
_RAW, _IPSET = f"PREROUTING -d {LOCAL[0]} -j DROP", "FORWARD -m set --match-set those dst -j DROP"
BANS = {
    Engine.NETFILTER: [
        (
            f"nft 'table inet ban {{ {_CHAIN.format('forward', LOCAL[0])} }}'",
            "nft delete table inet ban",
        ),
        (f"iptables -t raw -A {_RAW}", f"iptables -t raw -D {_RAW}"),
    ],
    Engine.FLOWS: [
        (
            f"nft 'table ip ban {{ {_SET} {_CHAIN.format('prerouting', '@those')} }}'",
            "nft delete table ip ban",
        ),
        (
            f"ipset create those hash:ip; ipset add those {LOCAL[0]}; iptables -A {_IPSET}",
            f"iptables -D {_IPSET}; ipset destroy those",
        ),
    ],
}
CONDITION = "DEGRADED (hand-over blocked)"


class ThreeNodes(handing_nodes.ThreeNodes):
    """The agents test themselves."""

    def __init__(self, lab: Lab, folder: Path, engine: Engine) -> None:
        super().__init__(lab, folder, engine)
        options = "--hand-over=keep-client", *OPTIONS[1:], f"--packet-path={engine}"
        self.agents = [ForkedAgent(lab, node, folder / "tested", *options) for node in self.nodes]

    def believe(self, among: dict[str, set[str]]) -> None:
        """They find out."""

    def start(self) -> None:
        """The switch drops what node three sends to others from addresses that are not its own."""
        three = self.nodes[2]
        self.nodes[0].ip(
            "link add eth1 type veth peer name eth1-peer",
            "address add 10.99.0.1/24 dev eth1",
            "link set eth1-peer up",
            "link set eth1 up",
        )
        with nodes.entered(self.lab.router.netns):
            nodes.run("nft", GUARD.format(node=3, v4=three.v4, v6=three.v6))
        self.write(self.local("three"))
        for agent in self.agents:
            agent.start()

    def explains(self, address: str) -> tuple[str, str]:
        done = self.ebpflb("explain", f"{address}:{PORT}", "--from", "outside")
        assert not done.returncode, done.stderr
        return done.stdout, done.stderr

    def unguard(self) -> None:
        with nodes.entered(self.lab.router.netns):
            nodes.run("nft", "delete table bridge guard")

    def change_rules(self, command: str) -> None:
        """On the first node."""
        with nodes.entered(self.nodes[0].netns):
            nodes.run("sh", "-ec", command)

    def status(self, node: int) -> status.AgentStatus:
        found = status.read(self.agents[node].paths)
        assert found
        return found


@pytest.fixture(params=two_nodes.ENGINES, ids=str)
def three(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ThreeNodes]:
    two_nodes.require(request.param, Routed())
    with started(lambda lab: ThreeNodes(lab, tmp_path, request.param)) as made:
        yield made


def test_nodes_are_tested_before_and_while_they_are_handed_to(three: ThreeNodes) -> None:
    """What a switch drops is found, named and a condition; without that the node is handed to. A
    rule at the first node that drops an address is obeyed. Another uplink is named. With the
    endpoint's agent dead, or with all, everything goes on, and a new agent believes as before.
    """
    client, one = f"pod-three {three.outside.v4}", three.agents[0]
    wait_until("it is found", lambda: three.status(0).hand_over_blocked.keys() == {"three"}, 60)
    wait_until("two is believed", lambda: three.status(0).hand_over == "to 1 of 2 other nodes", 60)
    assert "packets of " in three.status(0).hand_over_blocked["three"]
    assert CONDITION in three.ebpflb("status").stdout
    assert not three.sees(LOCAL[0])
    three.unguard()
    wait_until("it is served", lambda: three.sees(LOCAL[0]) == client, 60)
    wait_until("both families are", lambda: bool(three.sees(LOCAL[1])), 60)
    wait_until("nothing is blocked", lambda: not three.status(0).hand_over_blocked, 60)
    assert three.status(0).not_handed_at.keys() == {"eth1"}
    told, noted = three.explains(LOCAL[0])
    assert "by its MAC address" in told and "handed: goes to an endpoint on another" in told
    assert "a packet that comes in here is handed to three, which has 1 of 1 endpoints" in noted
    told, noted = three.explains("10.96.0.1")
    assert f"{three.pods['three'].v4}:" in told and "handed" not in told + noted
    for rule, without in BANS[three.engine]:
        three.change_rules(rule)
        wait_until("the rule is obeyed", lambda: not three.sees(LOCAL[0]), 60)
        assert three.sees(LOCAL[1])
        wait_until("it is named", lambda: LOCAL[0] in three.status(0).hand_over_blocked, 60)
        three.change_rules(without)
        wait_until("it is served again", lambda: three.sees(LOCAL[0]) == client, 60)
    three.agents[2].stop(signal.SIGKILL)
    one.stop()
    one.start()

    def has_tested_both() -> bool:
        assert three.sees(LOCAL[0]) == client
        return three.status(0).hand_over == "to 2 of 2 other nodes"

    wait_until("both are tested", has_tested_both, 60)
    for agent in three.agents:
        agent.stop(signal.SIGKILL)
    assert three.sees(LOCAL[0]) == client and three.sees(LOCAL[1])
