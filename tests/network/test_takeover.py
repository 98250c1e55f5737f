# SPDX-License-Identifier: Apache-2.0
"""Taking over from kube-proxy and giving back, on a node with its rules (docs/migration.md).

Nothing else on this node needs NAT or conntrack, which is the hard case: the kernel stops both with
the last rule that uses them, and every translated connection would end.
"""

import socket
import subprocess
from collections.abc import Callable, Iterator
from errno import ENOTCONN
from pathlib import Path
from socket import SOCK_DGRAM, SOCK_STREAM

import pytest

from ebpflb.kernel.attach import tcx
from ebpflb.kernel.netfilter import conntrack
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.model.services import Protocol
from tests.kernel.node import answering, nodes
from tests.kit import kube_proxy_node, requests
from tests.kit.cluster import NODEPORT, PORT, VIP, Cluster, endpoint, web
from tests.kit.kube_proxy_node import NAMES, KubeProxyNode, iptables_legacy, iptables_nft, nftables
from tests.kit.sockets import Socket

Load = Callable[[Cluster], None]

every_mode = pytest.mark.parametrize("load", [nftables, iptables_legacy, iptables_nft])


@pytest.fixture(params=["flows", "netfilter"])
def node(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[KubeProxyNode]:
    with kube_proxy_node.running(tmp_path, request.param) as made:
        yield made


def echo(client: Socket, said: bytes) -> bytes:
    """Return what comes back over an open connection."""
    client.send(said)
    answer: bytes = client.recv(64)
    return answer


def go_on(clients: list[Socket], said: bytes) -> None:
    """Check that each client gets its own words back."""
    assert [echo(client, said) for client in clients] == [said] * len(clients)


def are_answered(clients: list[Socket]) -> None:
    assert {echo(client, b"?").split()[0].decode() for client in clients} <= NAMES


@every_mode
def test_no_connection_fails_in_a_takeover(node: KubeProxyNode, load: Load) -> None:
    """No connection fails or ends while ebpflb starts and the rules are removed; ebpflb serves new
    connections. UDP sockets that kube-proxy's rules served are still answered, perhaps by another
    endpoint.
    """
    load(node)
    # An emulated agent starts for longer than conntrack keeps a flow of one exchange.
    node.node.sysctl("net.netfilter.nf_conntrack_udp_timeout", 600)
    streams, datagrams = node.open(SOCK_STREAM), node.open(SOCK_DGRAM)
    with node.unfailing(node.ways):
        node.agent.start()
        go_on(streams, b"beside")
        are_answered(datagrams)
        assert node.has_rules()
        done = node.ebpflb("cleanup", "--kube-proxy")
        assert done.returncode == 0, done.stderr
        assert not node.has_rules()
    go_on(streams, b"alone")
    are_answered(datagrams)
    assert node.asks(requests.tcp) == [NAMES] * len(node.ways)
    assert node.asks(requests.udp) == [NAMES] * len(node.ways)


def segments_lost(host: Host) -> int:
    """Return the number of segments that this host sent again, without spurious ones, because an
    emulated machine may exceed the first time-out.
    """
    counters = counters_of(host, "snmp", "Tcp:") | counters_of(host, "netstat", "TcpExt:")
    return counters["RetransSegs"] - counters["TCPDSACKRecv"]


def counters_of(host: Host, file: str, kind: str) -> dict[str, int]:
    command = [*host.enter, "cat", f"/proc/net/{file}"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names, values = (line.split()[1:] for line in text.splitlines() if line.startswith(kind))
    return dict(zip(names, map(int, values), strict=True))


def has_ended(client: Socket) -> bool:
    """Whether the socket has lost its connection."""
    try:
        client.getpeername()
    except OSError as error:
        return error.errno == ENOTCONN
    return False


def test_silent_datagram_sockets_are_ended(node: KubeProxyNode) -> None:
    """Sockets of the node that conntrack has forgotten would reach no one without the rules: they
    get an error at once, and new connections are answered. Others go on, even if the cluster IP is
    their own address, as in mode ipvs: br_netfilter translates the replies at the bridge's port.
    """
    nftables(node)
    node.node.ip("link add ipvs type bridge", f"address add {VIP}/32 dev ipvs")
    ways = [way for way in node.ways if way[0] is node.node][:1]
    (silent,) = node.open(SOCK_DGRAM, ways)
    with nodes.entered(node.node.netns):
        assert conntrack.delete(list(conntrack.connections(lambda *_: True, Protocol.UDP)))
    (used,) = node.open(SOCK_DGRAM, ways)
    assert used.getsockname()[0] == VIP
    node.node.sysctl("net.netfilter.nf_conntrack_udp_timeout", 600)
    are_answered([used])
    node.agent.start()
    are_answered([used])
    wait_until("the socket is ended", lambda: has_ended(silent))
    are_answered(node.open(SOCK_DGRAM, ways))


def add_qdiscs(host: Host) -> None:
    """Add the qdiscs that an agent without tcx would add first. While a device gets its qdisc, the
    kernel drops outgoing packets for some milliseconds (docs/limits.md).
    """
    with nodes.entered(host.netns):
        names = [name for _, name in socket.if_nameindex()]
    for name in names:
        subprocess.run([*host.enter, "tc", "qdisc", "add", "dev", name, "clsact"], check=True)


@pytest.mark.extended
def test_no_packet_is_lost(node: KubeProxyNode) -> None:
    """Packets in flight while programs are attached to many devices all get replies."""
    nftables(node)
    unhooked = node.lab.pod(node.node, "unhooked", 3, hooked=False)
    node.node.ip(*(f"link add other{i} up type bridge" for i in range(60)))
    ways = [(node.outside, (node.node.v4, NODEPORT)), (unhooked, (VIP, PORT))]
    for host, where in ways:  # neighbours are resolved
        requests.tcp(node.sockets(host), *where)
    if not tcx.works():
        add_qdiscs(node.node)
    before = [segments_lost(host) for host, _ in ways]
    asks = ("tcp", "tcp", "connected-udp", "connected-udp")
    pressing = [
        node.start_client(host, ask, *where, pause=0.001) for host, where in ways for ask in asks
    ]
    node.agent.start()
    counts = [node.stop_client(each) for each in pressing]
    assert [count["errors"] for count in counts] == [{}] * len(counts)
    assert [segments_lost(host) for host, _ in ways] == before


@every_mode
def test_nat_goes_last(node: KubeProxyNode, load: Load) -> None:
    """The table that keeps NAT working stays while connections need it; then cleanup removes it."""
    load(node)
    open_before = node.open(SOCK_STREAM)
    node.agent.start()
    assert "is kept while" in node.ebpflb("cleanup", "--kube-proxy").stdout
    node.ebpflb("cleanup", "--kube-proxy")
    go_on(open_before, b"still")


@every_mode
def test_give_back(node: KubeProxyNode, load: Load) -> None:
    """If kube-proxy's rules are back, `ebpflb cleanup` ends no connection that was translated at
    its socket or by conntrack; connections of the flow tables end. Every UDP socket is still
    answered.
    """
    node.agent.start()
    streams, datagrams = node.open(SOCK_STREAM, node.lasting), node.open(SOCK_DGRAM)
    load(node)
    with node.unfailing(node.lasting):
        node.agent.stop()
        done = node.ebpflb("cleanup")
        assert (done.returncode, "stays" in done.stdout) == (0, False)
    for _ in range(2):
        go_on(streams, b"back")
        are_answered(datagrams)
    assert node.asks(requests.tcp) == [NAMES] * len(node.ways)
    assert node.asks(requests.udp) == [NAMES] * len(node.ways)


def test_old_programs_keep_a_kube_proxy_from_serving(node: KubeProxyNode, tmp_path: Path) -> None:
    """After an agent has ended, its endpoint is removed and only a kube-proxy knows the new ones:
    clients fail until ebpflb is removed or an agent starts, as `status` advises.
    """
    gone, *left = node.web
    node.publish(web(endpoint(gone), nodeport=NODEPORT))
    node.agent.start()
    node.agent.stop()
    node.lab.processes[0].kill()  # the server of the first pod
    node.web = left
    nftables(node)
    ways = [way for way in node.ways if ":" not in way[1][0]]
    with nodes.entered(node.node.netns), answering.process(tmp_path):
        said = " ".join(node.ebpflb("status").stdout.split())
    assert "no agent updates them" in said and "run `ebpflb cleanup`" in said
    for host, where in ways:
        with pytest.raises(OSError, match="refused"):
            requests.tcp(node.sockets(host), *where)
    assert node.ebpflb("cleanup").returncode == 0
    for host, where in ways:
        assert requests.tcp(node.sockets(host), *where).name in {pod.name for pod in left}
