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
from tests.kit import handing_nodes
from tests.kit.forked import ForkedAgent
from tests.kit.handing_nodes import LOCAL, OPTIONS
from tests.kit.lab_cluster import PORT, started

GUARD = """table bridge guard {{ chain c {{
    type filter hook forward priority 0;
    iifname "nodes{node}" ether type ip ip saddr != {v4} drop
    iifname "nodes{node}" ether type ip6 ip6 saddr != {{ {v6}, fe80::/10 }} drop
}}; }}"""
BAN = f"""table inet ban {{ chain c {{
    type filter hook forward priority 0; ip daddr {LOCAL[0]} drop
}}; }}"""
CONDITION = "DEGRADED (hand-over blocked)"


class ThreeNodes(handing_nodes.ThreeNodes):
    """The agents test themselves."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        super().__init__(lab, folder, Engine.NETFILTER)
        options = "--hand-over=keep-client", *OPTIONS[1:]
        self.agents = [ForkedAgent(lab, node, folder / "tested", *options) for node in self.nodes]

    def believe(self, among: dict[str, set[str]]) -> None:
        """They find out."""

    def start(self) -> None:
        """The switch drops what node three sends to others from addresses that are not its own."""
        three = self.nodes[2]
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

    def status(self, node: int) -> status.AgentStatus:
        found = status.read(self.agents[node].paths)
        assert found
        return found


@pytest.fixture
def three(tmp_path: Path) -> Iterator[ThreeNodes]:
    with started(lambda lab: ThreeNodes(lab, tmp_path)) as made:
        yield made


def test_nodes_are_tested_before_and_while_they_are_handed_to(three: ThreeNodes) -> None:
    """What a switch drops is found, named and a condition; without that the node is handed to. A
    rule at the first node that drops an address is obeyed. With the endpoint's agent dead, or with
    all, everything goes on, and a new agent believes as before.
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
    told, noted = three.explains(LOCAL[0])
    assert "by its MAC address" in told and "handed: goes to an endpoint on another" in told
    assert "a packet that comes in here is handed to three, which has 1 of 1 endpoints" in noted
    told, noted = three.explains("10.96.0.1")
    assert "masqueraded: " in told and "comes in here" not in noted
    with nodes.entered(one.node.netns):
        nodes.run("nft", BAN)
    wait_until("the rule is obeyed", lambda: not three.sees(LOCAL[0]), 60)
    assert three.sees(LOCAL[1])
    wait_until("it is named", lambda: LOCAL[0] in three.status(0).hand_over_blocked, 60)
    with nodes.entered(one.node.netns):
        nodes.run("nft", "delete table inet ban")
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
