# SPDX-License-Identifier: Apache-2.0
"""Two nodes that serve the same NodePort, so that their conntrack entries can be compared.

    near     ebpflb, with the engine netfilter
    rules    kube-proxy's nftables rules, no agent
    far      there: the only endpoint
    outside  a client beyond the router, which drops what is sent to FORGED sources

IPv4 only, as bench.kubeproxy writes the rules.
"""

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench import kubeproxy
from bench.services import NodePort
from ebpflb.entries.flows import Connection
from ebpflb.kernel.netfilter import conntrack
from ebpflb.lab import cni
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host, Lab
from ebpflb.model.packet_path import Engine
from tests.kernel.node import nodes
from tests.kit import flood
from tests.kit.lab_cluster import NODEPORT, TARGET, LabCluster, started

FEW = 10  # connections of the nodes' own
FORGED, FIRST = "172.16.0.0/12", "172.16.0.1"
SERVICE_IP = "10.96.0.10"
_FLOOD = Path(flood.__file__)


class BesideKubeProxy(LabCluster):
    """``nodes`` are the two nodes to compare, ebpflb's first."""

    engine = Engine.NETFILTER

    def __init__(self, lab: Lab, folder: Path) -> None:
        super().__init__(lab, folder)
        self.near, self.rules = lab.node("near", 1), lab.node("rules", 2)
        self.far = lab.node("far", 3)
        self.nodes = (self.near, self.rules)
        for node in self.nodes:
            lab.join(node, self.far)
        self.there = lab.pod(self.far, "there", 11)
        self.outside = lab.outside("outside", 1)
        lab.router.ip(f"route add blackhole {FORGED}")
        self.service = NodePort(
            "web", SERVICE_IP, NODEPORT, ("tcp", "udp"), ((self.there.v4, self.far.name),)
        )
        pods = cni.NETWORKS[0]
        self.rules.nft(kubeproxy.nft([self.service], "rules", self.rules.v4, pods))
        self.agent = self.add_agent(self.near, "--cluster-cidr", pods)
        # What it owes to a flood would come to entries of the next one.
        self.there.sysctl("net.ipv4.tcp_synack_retries", 0)
        self.start_program(self.there, "serve", self.there.name, str(TARGET))

    def start(self) -> None:
        self.agent.start()
        self.publish(self.service.manifests())

    def status(self) -> Any:
        """Return the output of `ebpflb status` on its node."""
        return json.loads(self.ebpflb("status", "-o", "json").stdout)

    def flood(
        self, node: Host, count: int, first: str = FIRST, source_port: int = flood.SOURCE_PORT
    ) -> None:
        """Send a SYN to the node's NodePort from each of ``count`` forged addresses."""
        words = (node.v4, str(NODEPORT), first, str(count), str(source_port))
        assert self.lab.keep(self.outside.python(_FLOOD, "many", *words)).wait() == 0

    @contextmanager
    def mute(self) -> Iterator[None]:
        """Drop everything sent to the endpoint, so that it answers no one."""
        rule = f"pref 1 to {self.there.v4} blackhole"
        self.far.ip(f"rule add {rule}")
        try:
            yield
        finally:
            self.far.ip(f"rule del {rule}")

    def forget(self) -> None:
        """Empty the conntrack of both nodes; deleted entries count until the kernel frees them."""
        for node in self.nodes:
            with nodes.entered(node.netns):
                conntrack.delete(conntrack.connections(lambda *_: True))
                wait_until("the entries are freed", lambda: conntrack.count() < FEW)


def entries(node: Host) -> list[Connection]:
    """Return the flows to the NodePort in the node's conntrack."""
    with nodes.entered(node.netns):
        return list(conntrack.connections(lambda _, __, port: port == NODEPORT))


def kinds(node: Host) -> Counter[tuple[str, int]]:
    """Return the number of entries of each kind: TCP's state, and the bits of the status."""
    return Counter((entry.state_name, entry.status) for entry in entries(node))


@contextmanager
def running(folder: Path) -> Iterator[BesideKubeProxy]:
    """Yield both nodes; everything is removed afterwards."""
    with started(lambda lab: BesideKubeProxy(lab, folder)) as made:
        yield made
