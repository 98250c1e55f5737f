# SPDX-License-Identifier: Apache-2.0
"""A node with kube-proxy's rules, from which ebpflb takes over, or to which it gives back."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import SOCK_DGRAM

from bench import kubeproxy
from bench.services import NodePort
from ebpflb.lab import cni
from ebpflb.lab.hosts import Host, Lab
from ebpflb.model.packet_path import Engine
from tests.kit import needs, requests
from tests.kit.cluster import NODEPORT, PORT, VIP, VIP6, Cluster, endpoint, web
from tests.kit.lab_cluster import new_lab
from tests.kit.sockets import Socket
from tests.load import scaled

PODS, PODS6 = cni.NETWORKS
NAMES = {"web-1", "web-2", "web-3"}

Way = tuple[Host, tuple[str, int]]


class KubeProxyNode(Cluster):
    """A node that kube-proxy has served, whose agent is not started yet, and a client outside.

    ``names`` are its endpoints.
    """

    names = NAMES

    def __init__(self, lab: Lab, folder: Path, engine: str, *options: str) -> None:
        usual = "--cluster-cidr", f"{PODS},{PODS6}", "--packet-path", engine
        super().__init__(lab, folder, *usual, *options)
        self.flows_stay = engine == "netfilter"  # when ebpflb is removed
        self.outside = lab.outside("outside", 1)
        v6 = [endpoint(pod, v6=True) for pod in self.web]
        self.publish(web(*map(endpoint, self.web), v6=v6, nodeport=NODEPORT))
        inside = [(host, (vip, PORT)) for vip in (VIP, VIP6) for host in (self.client, self.node)]
        # Clients and the frontend of each, in both families: a pod, the node itself, from outside.
        self.ways: list[Way] = [
            *inside,
            *((self.outside, (address, NODEPORT)) for address in (self.node.v4, self.node.v6)),
        ]

    @property
    def lasting(self) -> list[Way]:
        """Return the clients whose connections `ebpflb cleanup` does not end."""
        return [way for way in self.ways if self.flows_stay or way[0] is not self.outside]

    def has_rules(self) -> bool:
        said = self.ebpflb("cleanup", "--kube-proxy", "--dry-run").stdout
        return "would be removed" in said

    def open(self, kind: int, ways: list[Way] | None = None) -> list[Socket]:
        """Open a client for each way, and get one answer."""
        clients = []
        for host, where in self.ways if ways is None else ways:
            client = self.sockets(host).open(requests.family_of(where[0]), kind)
            client.connect(where)
            if kind == SOCK_DGRAM:
                client.send(b"?")
            assert client.recv(64).split()[0].decode() in self.names
            clients.append(client)
        return clients

    @contextmanager
    def unfailing(self, ways: list[Way]) -> Iterator[None]:
        """Let clients connect again and again while the block runs; every request must succeed."""
        pressing = [self.start_client(host, "tcp", *where, pause=0.01) for host, where in ways]
        try:
            yield
        finally:
            counts = [self.stop_client(each) for each in pressing]
        for count in counts:
            assert count["errors"] == {}
            assert sum(count["names"].values()) > scaled(10)

    def asks(self, kind: requests.Send) -> list[set[str]]:
        """Return the backends that answer each client."""
        return [
            set(requests.backends(self.sockets(host), where[0], send=kind, port=where[1]))
            for host, where in self.ways
        ]


def services(node: Cluster, *, v6: bool) -> list[NodePort]:
    """Return the Service for the agent's manifests, equal to the one in kube-proxy's rules."""
    endpoints = tuple((pod.v6 if v6 else pod.v4, "node") for pod in node.web)
    return [NodePort("web", VIP6 if v6 else VIP, NODEPORT, ("tcp", "udp"), endpoints)]


def nftables(node: Cluster) -> None:
    node.node.nft(kubeproxy.nft(services(node, v6=False), "node", node.node.v4, PODS))
    node.node.nft(kubeproxy.nft(services(node, v6=True), "node", node.node.v6, PODS6))


def iptables_legacy(node: Cluster) -> None:
    iptables(node, "legacy")


def iptables_nft(node: Cluster) -> None:
    iptables(node, "nft")


def iptables(node: Cluster, variant: str) -> None:
    for tool, pods, v6 in (("iptables", PODS, False), ("ip6tables", PODS6, True)):
        said = kubeproxy.iptables(services(node, v6=v6), pods)
        words = [*node.node.enter, f"{tool}-{variant}-restore", "--noflush"]
        subprocess.run(words, input=said, text=True, check=True)


@contextmanager
def running(folder: Path, engine: str, *options: str) -> Iterator[KubeProxyNode]:
    """Yield the node; everything is removed afterwards. Skips an engine that this kernel lacks."""
    if engine == Engine.NETFILTER:
        needs.netfilter()
    with new_lab() as lab:
        made = KubeProxyNode(lab, folder, engine, *options)
        try:
            yield made
        finally:
            made.close()
