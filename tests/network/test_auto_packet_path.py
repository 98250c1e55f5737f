# SPDX-License-Identifier: Apache-2.0
"""Which engine a real agent takes with --packet-path=auto, and that it serves as the node changes.

Clients: a host outside, and a pod whose sockets the hooks do not see (a virtual machine).
"""

import json
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from socket import SOCK_STREAM

import pytest

from ebpflb.kernel.netfilter import conntrack
from ebpflb.lab import cni
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host, Lab
from ebpflb.lab.manifests import Manifest
from ebpflb.model.packet_path import SYSCTLS, Engine
from tests.kernel.node import nodes
from tests.kit import needs, requests
from tests.kit.cluster import endpoint, web
from tests.kit.lab_cluster import NODEPORT, PORT, TARGET, LabCluster, new_lab
from tests.kit.sockets import Socket

VIPS = ("10.96.0.10", "fd00:96::10")
OPTIONS = ("--packet-path=auto", "--iptables-sync-period=1s")
WORKS = "the kernel's NAT works with nftables"

pytestmark = needs.bridge_netfilter


class Auto(LabCluster):
    """A node whose pods' bridge hands packets to netfilter or not; it does not at first."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        super().__init__(lab, folder)
        self.node = lab.node("node", 1, cni.Bridge(hairpin=True))
        self.outside = lab.outside("outside", 1)
        self.server = lab.outside("server", 2)
        self.start_program(self.server, "serve", "server", str(TARGET))
        self.call(0)
        self.agent = self.add_agent(self.node, *OPTIONS)
        self.pods: list[Host] = []

    def call(self, netfilter: int) -> None:
        """Whether bridges hand packets to netfilter, from now on."""
        for name in SYSCTLS.values():
            self.node.sysctl(name.replace("/", "."), netfilter)

    def hairpin(self, mode: str) -> None:
        """Set the hairpin mode of the first pod's port."""
        self.node.ip(f"link set veth11 type bridge_slave hairpin {mode}")

    def pod(self, name: str, number: int) -> Host:
        """Return a pod that serves, and that the hooks do not see."""
        pod = self.lab.pod(self.node, name, number, hooked=False)
        self.start_program(pod, "serve", name, str(TARGET))
        self.pods.append(pod)
        self.publish(self.service())
        return pod

    def service(self) -> list[Manifest]:
        """Of all pods that serve; of a host elsewhere as long as there is none."""
        pods, where = (self.pods, "node") if self.pods else ([self.server], "elsewhere")
        v4, v6 = ([endpoint(pod, v6=v6, node=where) for pod in pods] for v6 in (False, True))
        return web(*v4, v6=v6, nodeport=NODEPORT)

    def connection(self, v6: bool = False) -> Socket:
        """A client's outside, by the NodePort, which has been answered once."""
        where = self.node.v6 if v6 else self.node.v4
        client = self.sockets(self.outside).open(requests.family_of(where), SOCK_STREAM)
        client.connect((where, NODEPORT))
        assert client.recv(64)
        return client

    def opened_by(self, client: Socket) -> Engine:
        """Which engine has the flow of a connection."""
        port, own = client.getsockname()[1], {ip_address(self.node.v4), ip_address(self.node.v6)}
        with nodes.entered(self.node.netns):
            found = [each.original for each in conntrack.connections(lambda *_: True)]
        known = any(e.source_port == port and e.destination in own for e in found)
        return Engine.NETFILTER if known else Engine.FLOWS

    def says(self, engine: Engine, reason: str) -> bool:
        """Whether status, the metric and the log's last word name the engine, and why."""
        said = json.loads(self.ebpflb("status", "-o", "json").stdout)
        path = said["packet_path"] or {"engine": "none yet", "reason": ""}
        lines = [line for line in self.agent.log().splitlines() if "packet path: " in line]
        metric = [line for line in self.metrics() if line.startswith("ebpflb_packet_path_info{")]
        wanted = f'engine="{engine}"'
        return (
            path["engine"] == engine
            and reason in path["reason"]
            and f"packet path: {engine} (" in "".join(lines[-1:])
            and reason in lines[-1]
            and len(metric) == 1
            and wanted in metric[0]
            and reason in metric[0]
        )

    def comes_to_say(self, engine: Engine, reason: str) -> None:
        """Returns when all three say so, each of which is written at a time of its own."""
        wait_until(f"the engine is {engine}", lambda: self.says(engine, reason))

    def serves(self) -> None:
        """Every client is answered, by both protocols and families."""
        for send in (requests.tcp, requests.udp):
            for v6 in (False, True):
                nodeport = (self.node.v6 if v6 else self.node.v4, NODEPORT)
                assert send(self.sockets(self.outside), *nodeport).peer == nodeport
                for pod in self.pods:
                    assert send(self.sockets(pod), VIPS[v6]).peer == (VIPS[v6], PORT)


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Auto]:
    """Its agent is not started yet."""
    needs.netfilter()
    with new_lab() as lab:
        auto = Auto(lab, tmp_path)
        try:
            yield auto
        finally:
            auto.close()


def test_auto_changes_with_the_node_and_no_connection_ends(made: Auto) -> None:
    """The first pod on a bridge, br_netfilter and hairpin mode change it; all connections go on."""
    made.start()
    made.publish(made.service())
    made.comes_to_say(Engine.NETFILTER, WORKS)
    opened = [(made.connection(), Engine.NETFILTER)]

    def becomes(engine: Engine, reason: str) -> None:
        made.comes_to_say(engine, reason)
        opened.append((made.connection(), engine))
        assert made.opened_by(opened[-1][0]) is engine
        made.serves()

    made.pod("one", 11)
    becomes(Engine.FLOWS, "pods on the bridge cni0 answer each other without conntrack")
    made.call(1)
    becomes(Engine.NETFILTER, WORKS)
    made.hairpin("off")
    becomes(Engine.FLOWS, "without hairpin mode")
    made.hairpin("on")
    becomes(Engine.NETFILTER, WORKS)
    made.call(0)
    becomes(Engine.FLOWS, "answer each other without conntrack")
    for client, engine in opened:
        client.send(b"still here")
        assert client.recv(64) == b"still here"
        assert made.opened_by(client) is engine
