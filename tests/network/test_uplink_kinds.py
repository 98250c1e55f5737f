# SPDX-License-Identifier: Apache-2.0
"""A load balancer address, and requests that are handed over, at uplinks that are no Ethernet
devices: three nodes, of which the last to answer for the address has the endpoint.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ebpflb.lab import cni, manifests
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Lab
from ebpflb.lab.router import NODES
from ebpflb.model.annotations import FORWARDING_ANNOTATION
from ebpflb.model.packet_path import Engine
from ebpflb.model.pools import CLASS, ranked
from ebpflb.serve import status
from tests.kit import forked, needs, requests
from tests.kit.lab_cluster import PORT, TARGET, LabCluster, started
from tests.kit.pod_networks import Bond, BridgeUplink, Routed, Vlan

VIPS = "192.0.2.200", "fd02::200"
OWNER, _, LAST = ranked(VIPS[0], ["node-1", "node-2", "node-3"])
KINDS: list[list[Routed]] = [
    [BridgeUplink(), BridgeUplink(), BridgeUplink()],
    [Bond(), Vlan(), BridgeUplink()],
    [Vlan(), BridgeUplink(), Bond()],
]


class ThreeNodes(LabCluster):
    engine = Engine.NETFILTER

    def __init__(self, lab: Lab, folder: Path, kinds: Sequence[Routed]) -> None:
        super().__init__(lab, folder)
        self.nodes = []
        for number, kind in enumerate(kinds, 1):
            with needs.devices():
                self.nodes.append(lab.node(f"node-{number}", number, kind))
                if isinstance(kind, Vlan):
                    Vlan.tag(lab.router, number)
        for one, other in zip(self.nodes, (*self.nodes[1:], self.nodes[0]), strict=True):
            lab.join(one, other)
        self.far = next(it for it in self.nodes if it.name == LAST)
        self.pod = lab.pod(self.far, "pod", 11)
        self.outside = lab.outside("outside", 1)
        self.start_program(self.pod, "serve", self.pod.name, str(TARGET))
        usual = "--hand-over=auto", "--l2-pool", ",".join(VIPS), "--devices", "!eth0"
        for node, kind in zip(self.nodes, kinds, strict=True):
            options = usual if isinstance(kind, BridgeUplink) else usual[:-2]
            self.add_agent(node, *options, "--cluster-cidr", ",".join(cni.NETWORKS))

    def start(self) -> None:
        port = {"name": "tcp", "port": TARGET, "protocol": "TCP"}
        web = manifests.service(
            "web",
            ["10.96.0.1", "fd00:96::1"],
            [{**port, "port": PORT}],
            annotations={FORWARDING_ANNOTATION: "keep-client"},
            ingress=VIPS,
            type="LoadBalancer",
            loadBalancerClass=CLASS,
        )
        slices = [
            manifests.endpoint_slice(
                "web",
                f"IP{family}",
                [manifests.endpoint(getattr(self.pod, family), node=LAST, target="pod")],
                [port],
            )
            for family in ("v4", "v6")
        ]
        self.write(web, *slices)
        for agent in self.agents:
            agent.start()

    def statuses(self) -> list[status.AgentStatus]:
        return [found for agent in self.agents if (found := status.read(agent.paths))]

    def explained(self) -> str:
        """What `explain` adds on a node without the endpoint."""
        agent = next(it for it in self.agents if it.node.name == OWNER)
        words = "explain", f"{VIPS[0]}:{PORT}", "--from", "outside"
        return forked.run(*words, *agent.where, netns=agent.node.netns).stderr

    def sees(self, address: str) -> str:
        """Whom the endpoint sees, after the router has asked for the MAC address; "" if nobody."""
        self.lab.router.ip(f"neigh flush to {address} dev {NODES.name}", v6=":" in address)
        try:
            return requests.tcp(self.sockets(self.outside), address).source
        except OSError:
            return ""


@pytest.fixture(params=KINDS, ids=lambda kinds: "-".join(type(it).__name__ for it in kinds))
def three(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ThreeNodes]:
    needs.netfilter()
    with started(lambda lab: ThreeNodes(lab, tmp_path, request.param)) as made:
        yield made


def test_addresses_and_hand_overs_at_uplinks_of_each_kind(three: ThreeNodes) -> None:
    """All agree who answers, and hand over to each other; the endpoint sees the client, whoever
    owns the address, and the address moves when the owner's cable is pulled.
    """

    def all_hand_over() -> bool:
        return [it.hand_over for it in three.statuses()] == ["to 2 of 2 other nodes"] * 3

    wait_until("all nodes are tested", all_hand_over)
    for address, client in zip(VIPS, (three.outside.v4, three.outside.v6), strict=True):
        wait_until(f"{address} is served", lambda: three.sees(address) == client)  # noqa: B023
    assert {it.address_owners[VIPS[0]] for it in three.statuses()} == {OWNER}
    assert three.explained() == (
        f"note: {VIPS[0]} is answered for by {OWNER} (owner of 3 living nodes); a packet that comes"
        f" in here is handed to {LAST}, which has 1 of 1 endpoints\n"
    )
    three.lab.router.ip(f"link set {NODES.name}{OWNER.removeprefix('node-')} down")
    wait_until("another node answers", lambda: three.sees(VIPS[0]) == three.outside.v4)
