# SPDX-License-Identifier: Apache-2.0
"""From kube-proxy's mode ipvs to ebpflb and back, beside another node (docs/migration.md)."""

from collections.abc import Iterator
from errno import EADDRNOTAVAIL
from pathlib import Path
from socket import (
    AF_INET,
    SO_ERROR,
    SO_LINGER,
    SO_REUSEADDR,
    SOCK_DGRAM,
    SOCK_STREAM,
    SOL_SOCKET,
)
from struct import pack

import pytest

from ebpflb.lab.agents import wait_until
from ebpflb.model.packet_path import Engine
from tests.kit import ipvs_nodes, requests
from tests.kit.cluster import NODEPORT, PORT, VIP
from tests.kit.ipvs_nodes import IpvsNodes
from tests.kit.kube_proxy_node import Way
from tests.kit.sockets import Socket

RETURNED = "is also running (its rules have come back): ebpflb handles packets first"
CONNECTIONS = 4  # of a client: round-robin leads them to each endpoint
pytestmark = pytest.mark.timeout(1400)  # emulated, as the kernels with IPVS are


@pytest.fixture(params=[Engine.NETFILTER, Engine.FLOWS], ids=str)
def nodes(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[IpvsNodes]:
    with ipvs_nodes.running(tmp_path, request.param) as made:
        yield made


def names(clients: list[Socket]) -> list[str]:
    """Return the endpoints that answer these UDP sockets."""
    return [echo(client).split()[0].decode() for client in clients]


def echo(client: Socket) -> bytes:
    client.send(b"?")
    said: bytes = client.recv(64)
    return said


def go_on(streams: list[Socket]) -> None:
    """Check that each connection still leads to its endpoint, which echoes."""
    assert [echo(client) for client in streams] == [b"?"] * len(streams)


def one_of_each_host(ways: list[Way]) -> list[Way]:
    return [*{host: (host, to) for host, to in ways}.values()]


def from_one_port(nodes: IpvsNodes, way: Way, kind: int) -> Socket:
    """Return an answered client, always from one port of its host: by TCP after another one as
    soon as its kernel allows it, in about a second.
    """
    host, to = way
    made: list[Socket] = []

    def is_open() -> bool:
        client = nodes.sockets(host).open(AF_INET, kind)
        client.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        client.bind((host.v4, 40_000))
        try:
            client.connect(to)
        except OSError as error:
            client.close()
            assert error.errno == EADDRNOTAVAIL
            return False
        made.append(client)
        return True

    wait_until("it is open", is_open)
    answer = echo(made[0]) if kind == SOCK_DGRAM else made[0].recv(64)
    assert answer.split()[0].decode() in nodes.names
    return made[0]


def test_no_connection_is_lost(nodes: IpvsNodes) -> None:
    """Connections of pods, of both nodes and from outside go on with IPVS, and all of its mode
    stays, while ebpflb serves new ones, none of which fails, not even from a port that IPVS still
    knows. Datagrams keep their endpoint: of the node itself always, others with netfilter.
    """
    nodes.add_ipvs()
    ways = [(nodes.client, (VIP, PORT)), (nodes.outside, (nodes.node.v4, NODEPORT))]
    again = [(way, kind) for way in ways for kind in (SOCK_STREAM, SOCK_DGRAM)]
    for host, _ in ways:
        host.sysctl("net.ipv4.tcp_tw_reuse", 1)
    for name in ("udp_timeout", "udp_timeout_stream"):  # an emulated agent starts slowly
        nodes.node.sysctl(f"net.netfilter.nf_conntrack_{name}", 600)
    streams = nodes.open(SOCK_STREAM, nodes.ways * CONNECTIONS)
    former = [from_one_port(nodes, *each) for each in again]
    asking = sorted(nodes.ways * CONNECTIONS, key=lambda way: way[0] is nodes.node)
    datagrams = nodes.open(SOCK_DGRAM, asking)
    own = -sum(host is nodes.node for host, _ in asking)
    before = names(datagrams)
    with nodes.unfailing(one_of_each_host(nodes.ways)):
        nodes.agent.start()
        go_on(streams)
        after = names(datagrams)
        kept = nodes.ebpflb("cleanup", "--kube-proxy")
        assert kept.returncode == 0, kept.stderr
        assert "what mode ipvs left is kept while IPVS has connections" in kept.stdout
        for _ in range(2 * CONNECTIONS):
            for each in former:
                each.close()
            former = [from_one_port(nodes, *each) for each in again]
        go_on(streams)
    assert set(after) <= nodes.names
    assert after[own:] == before[own:]
    if nodes.flows_stay:
        assert after == before
    end(nodes, [*streams, *former[::2]], [*former[1::2], *datagrams])


def end(nodes: IpvsNodes, streams: list[Socket], datagrams: list[Socket]) -> None:
    """Remove what mode ipvs left: when its connections have ended, or by force. The sysctls that
    nothing else sets are put back, the others named. A silent socket of the node is ended.
    """
    said: list[str] = []
    if nodes.flows_stay:
        nodes.feed("ipvsadm --set 0 0 2")
        names(datagrams)
        for each in streams:
            each.setsockopt(SOL_SOCKET, SO_LINGER, pack("ii", 1, 0))
            each.close()

    def is_done() -> bool:
        force = () if nodes.flows_stay else ("--force",)
        done = nodes.ebpflb("cleanup", "--kube-proxy", *force)
        assert done.returncode == 0, done.stderr
        said.extend(done.stdout.splitlines())
        return "nothing is left of kube-proxy" in said

    wait_until("IPVS has no connection", is_done)
    for line in (
        "removed: device kube-ipvs0",
        "removed: net.ipv4.vs.conntrack=1 (the kernel's default is 0)",
        "kept: net.ipv4.conf.all.arp_announce=2 (the kernel's default is 0)",
    ):
        assert any(line in each for each in said)
    assert not nodes.has_rules()
    assert set().union(*nodes.asks(requests.tcp), *nodes.asks(requests.udp)) == nodes.names
    wait_until("it is ended", lambda: datagrams[-1].getsockopt(SOL_SOCKET, SO_ERROR) != 0)


def test_none_is_lost_on_the_way_back(nodes: IpvsNodes) -> None:
    """When `status` says that kube-proxy serves again, `ebpflb cleanup` ends no connection
    that was translated at its socket or by conntrack, and no new one fails.
    """
    nodes.agent.start()
    streams = nodes.open(SOCK_STREAM, nodes.lasting * CONNECTIONS)
    datagrams = nodes.open(SOCK_DGRAM, nodes.lasting)
    nodes.add_ipvs()
    with nodes.unfailing(one_of_each_host(nodes.lasting)):
        wait_until("it is seen", lambda: RETURNED in nodes.ebpflb("status").stdout)
        go_on(streams)
        nodes.agent.stop()
        done = nodes.ebpflb("cleanup")
        assert done.returncode == 0, done.stderr
    go_on(streams)
    assert set(names(datagrams)) <= nodes.names
    assert set().union(*nodes.asks(requests.tcp), *nodes.asks(requests.udp)) == nodes.names
