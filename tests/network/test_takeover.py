# SPDX-License-Identifier: Apache-2.0
"""Taking over from kube-proxy and giving back, on a node with its rules (docs/migration.md).

Nothing else on this node needs NAT or conntrack, which is the hard case: the kernel stops both
with the last rule that asks for them, and every connection that is translated would end.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from socket import AF_INET, SOCK_DGRAM, SOCK_STREAM

import pytest

from bench import kubeproxy
from bench.services import NodePort
from ebpflb.datapath import conntrack_probe
from ebpflb.lab.hosts import Host, Lab
from ebpflb.lab.sockets import Socket
from ebpflb.options import Paths
from tests.kit import requests
from tests.kit.cluster import NODEPORT, PORT, VIP, Cluster, endpoint, web
from tests.kit.lab_cluster import PREFIX

PODS = "10.244.0.0/16"
NAMES = {"web-1", "web-2", "web-3"}

Load = Callable[[Cluster], None]


class KubeProxyNode(Cluster):
    """A node that kube-proxy has served, its agent not started yet, and a client outside."""

    def __init__(self, lab: Lab, folder: Path, engine: str) -> None:
        super().__init__(lab, folder, "--cluster-cidr", PODS, "--packet-path", engine)
        self.flows_stay = engine == "conntrack"  # when ebpflb is removed
        self.outside = lab.outside("outside", 1)
        self.publish(web(*map(endpoint, self.web), nodeport=NODEPORT))

    @property
    def ways(self) -> list[tuple[Host, tuple[str, int]]]:
        """Clients and the frontend of each: from outside, a pod and the node itself."""
        cluster_ip = (VIP, PORT)
        return [
            (self.outside, (self.node.v4, NODEPORT)),
            (self.client, cluster_ip),
            (self.node, cluster_ip),
        ]

    def ebpflb(self, *words: str) -> "subprocess.CompletedProcess[str]":
        """A command on the node."""
        command = [*self.node.enter, sys.executable, "-m", "ebpflb", *words, *self.agent.where]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    def has_rules(self) -> bool:
        said = self.ebpflb("cleanup", "--kube-proxy", "--dry-run").stdout
        return "would be removed" in said

    def open(self, kind: int) -> list[Socket]:
        """A client each way that has been answered once."""
        clients = []
        for host, where in self.ways:
            client = self.sockets(host).open(AF_INET, kind)
            client.connect(where)
            if kind == SOCK_DGRAM:
                client.send(b"?")
            assert client.recv(64).split()[0].decode() in NAMES
            clients.append(client)
        return clients

    @contextmanager
    def unfailing(self, ways: list[tuple[Host, tuple[str, int]]]) -> Iterator[None]:
        """Clients connect again and again as long as this lasts; all of it must succeed."""
        pressing = [self.start_client(host, "tcp", *where, pause=0.01) for host, where in ways]
        try:
            yield
        finally:
            counts = [self.stop_client(each) for each in pressing]
        for count in counts:
            assert count["errors"] == {}
            assert sum(count["names"].values()) > 10

    def asks(self, kind: requests.Send) -> list[set[str]]:
        """The backends that answer each client."""
        return [
            set(requests.backends(self.sockets(host), where[0], send=kind, port=where[1]))
            for host, where in self.ways
        ]


def services(node: Cluster) -> list[NodePort]:
    """The Service of the agent's manifests, as kube-proxy's rules have it."""
    endpoints = tuple((pod.v4, "node") for pod in node.web)
    return [NodePort("web", VIP, NODEPORT, ("tcp", "udp"), endpoints)]


def nftables(node: Cluster) -> None:
    node.node.nft(kubeproxy.nft(services(node), "node", node.node.v4, PODS))


def iptables_legacy(node: Cluster) -> None:
    iptables(node, "legacy")


def iptables_nft(node: Cluster) -> None:
    iptables(node, "nft")


def iptables(node: Cluster, variant: str) -> None:
    said = kubeproxy.iptables(services(node), PODS)
    words = [*node.node.enter, f"iptables-{variant}-restore", "--noflush"]
    subprocess.run(words, input=said, text=True, check=True)


every_mode = pytest.mark.parametrize("load", [nftables, iptables_legacy, iptables_nft])


@pytest.fixture(params=["flows", "conntrack"])
def node(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[KubeProxyNode]:
    if request.param == "conntrack" and conntrack_probe.obstacle(Paths.cache):
        pytest.skip("this kernel has no conntrack for programs")
    with Lab(PREFIX) as lab:
        made = KubeProxyNode(lab, tmp_path, request.param)
        try:
            yield made
        finally:
            made.close()


def echo(client: Socket, said: bytes) -> bytes:
    """What comes back over a connection that is open."""
    client.send(said)
    answer: bytes = client.recv(64)
    return answer


@every_mode
def test_takeover(node: KubeProxyNode, load: Load) -> None:
    """No connection fails or ends while ebpflb starts and the rules go; new ones are ebpflb's."""
    load(node)
    open_before = node.open(SOCK_STREAM)
    with node.unfailing(node.ways):
        node.agent.start()
        assert [echo(client, b"beside") for client in open_before] == [b"beside"] * 3
        assert node.has_rules()
        done = node.ebpflb("cleanup", "--kube-proxy")
        assert done.returncode == 0, done.stderr
        assert not node.has_rules()
    assert [echo(client, b"alone") for client in open_before] == [b"alone"] * 3
    assert node.asks(requests.tcp) == [NAMES] * 3
    assert node.asks(requests.udp) == [NAMES] * 3


def retransmissions(host: Host) -> int:
    """Segments that all connections of this host have sent again."""
    command = [*host.enter, "cat", "/proc/net/snmp"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names, values = (line.split() for line in text.splitlines() if line.startswith("Tcp:"))
    return int(values[names.index("RetransSegs")])


def test_no_packet_is_lost(node: KubeProxyNode) -> None:
    """Packets in flight while programs are attached, on many devices, all get their replies."""
    nftables(node)
    hidden = node.lab.pod(node.node, "hidden", 3, hooked=False)
    node.node.ip(*(f"link add other{i} up type bridge" for i in range(60)))
    ways = [(node.outside, (node.node.v4, NODEPORT)), (hidden, (VIP, PORT))]
    for host, where in ways:  # neighbours are resolved
        requests.tcp(node.sockets(host), *where)
    before = [retransmissions(host) for host, _ in ways]
    asks = ("tcp", "tcp", "connected-udp", "connected-udp")
    pressing = [node.start_client(host, ask, *where) for host, where in ways for ask in asks]
    node.agent.start()
    counts = [node.stop_client(each) for each in pressing]
    assert [count["errors"] for count in counts] == [{}] * len(counts)
    assert [retransmissions(host) for host, _ in ways] == before


@every_mode
def test_takeover_datagrams(node: KubeProxyNode, load: Load) -> None:
    """UDP sockets that kube-proxy's rules served are answered on, perhaps by another endpoint."""
    load(node)
    open_before = node.open(SOCK_DGRAM)
    node.agent.start()
    for _ in range(2):
        for client in open_before:
            assert echo(client, b"?").split()[0].decode() in NAMES
        node.ebpflb("cleanup", "--kube-proxy")


@every_mode
def test_nat_goes_last(node: KubeProxyNode, load: Load) -> None:
    """What keeps NAT working stays while a connection needs it; then a cleanup removes it."""
    load(node)
    open_before = node.open(SOCK_STREAM)
    node.agent.start()
    assert "stays as long as" in node.ebpflb("cleanup", "--kube-proxy").stdout
    node.ebpflb("cleanup", "--kube-proxy")
    assert [echo(client, b"still") for client in open_before] == [b"still"] * 3


@every_mode
def test_give_back(node: KubeProxyNode, load: Load) -> None:
    """With kube-proxy's rules back `ebpflb cleanup` ends no connection that was made at a socket,
    and none that conntrack translates; those of the flow tables end.
    """
    node.agent.start()
    first = 0 if node.flows_stay else 1
    staying = node.open(SOCK_STREAM)[first:]
    load(node)
    with node.unfailing(node.ways[first:]):
        node.agent.stop()
        done = node.ebpflb("cleanup")
        assert (done.returncode, "stays" in done.stdout) == (0, False)
    for _ in range(2):
        assert [echo(client, b"back") for client in staying] == [b"back"] * len(staying)
    assert node.asks(requests.tcp) == [NAMES] * 3
    assert node.asks(requests.udp) == [NAMES] * 3


def test_stale_rules(node: KubeProxyNode) -> None:
    """A service deleted since is still reached by kube-proxy's rules, as `status` warns."""
    nftables(node)
    node.agent.start()
    node.publish()
    assert "has stopped and left table ip kube-proxy" in node.ebpflb("status").stdout
    assert set(requests.backends(node.sockets(node.outside), node.node.v4, port=NODEPORT)) == NAMES
    node.ebpflb("cleanup", "--kube-proxy")
    with pytest.raises(OSError, match="refused"):
        requests.tcp(node.sockets(node.outside), node.node.v4, NODEPORT)
