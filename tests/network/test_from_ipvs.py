# SPDX-License-Identifier: Apache-2.0
"""From kube-proxy's mode ipvs to ebpflb and back, beside another node (docs/migration.md)."""

from collections.abc import Iterator
from pathlib import Path
from socket import SOCK_DGRAM, SOCK_STREAM

import pytest

from ebpflb.model.packet_path import Engine
from tests.kit import ipvs_nodes, requests
from tests.kit.ipvs_nodes import IpvsNodes
from tests.kit.sockets import Socket

CONNECTIONS = 4  # of a client: round-robin leads them to each endpoint


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


def test_no_connection_is_lost(nodes: IpvsNodes) -> None:
    """Connections of pods, of both nodes and from outside go on with IPVS, and all of its mode
    stays, while ebpflb serves new ones, none of which fails. Datagrams keep their endpoint with
    netfilter, but those of the node's own sockets, which are ended. With --force all of the mode
    goes; the sysctls that nothing else sets are put back, the others named.
    """
    nodes.add_ipvs()
    for name in ("udp_timeout", "udp_timeout_stream"):  # an emulated agent starts slowly
        nodes.node.sysctl(f"net.netfilter.nf_conntrack_{name}", 600)
    others = [way for way in nodes.ways if way[0] is not nodes.node]
    streams = nodes.open(SOCK_STREAM, nodes.ways * CONNECTIONS)
    datagrams = nodes.open(SOCK_DGRAM, others * CONNECTIONS)
    before = names(datagrams)
    with nodes.unfailing(nodes.ways):
        nodes.agent.start()
        go_on(streams)
        after = names(datagrams)
        kept = nodes.ebpflb("cleanup", "--kube-proxy")
        assert kept.returncode == 0, kept.stderr
        assert "what mode ipvs left is kept while IPVS has connections" in kept.stdout
        go_on(streams)
    assert set(after) <= nodes.names
    if nodes.flows_stay:
        assert after == before
    done = nodes.ebpflb("cleanup", "--kube-proxy", "--force")
    assert done.returncode == 0, done.stderr
    for line in (
        "removed: device kube-ipvs0",
        "removed: net.ipv4.vs.conntrack=1 (the kernel's default is 0)",
        "kept: net.ipv4.conf.all.arp_announce=2 (the kernel's default is 0)",
        "nothing is left of kube-proxy",
    ):
        assert line in done.stdout
    assert not nodes.has_rules()
    assert set().union(*nodes.asks(requests.tcp), *nodes.asks(requests.udp)) == nodes.names


def test_none_is_lost_on_the_way_back(nodes: IpvsNodes) -> None:
    """When kube-proxy's mode ipvs serves again, `ebpflb cleanup` ends no connection that was
    translated at its socket or by conntrack, and no new one fails.
    """
    nodes.agent.start()
    streams = nodes.open(SOCK_STREAM, nodes.lasting * CONNECTIONS)
    datagrams = nodes.open(SOCK_DGRAM, nodes.lasting)
    nodes.add_ipvs()
    with nodes.unfailing(nodes.lasting):
        go_on(streams)
        nodes.agent.stop()
        done = nodes.ebpflb("cleanup")
        assert done.returncode == 0, done.stderr
    go_on(streams)
    assert set(names(datagrams)) <= nodes.names
    assert set().union(*nodes.asks(requests.tcp), *nodes.asks(requests.udp)) == nodes.names
