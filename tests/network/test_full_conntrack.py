# SPDX-License-Identifier: Apache-2.0
"""In a full conntrack table half-open flows give way to new ones, of both families and protocols,
and no others do: neither established ones nor those of other network namespaces.
"""

from collections.abc import Iterator
from pathlib import Path
from socket import SOCK_DGRAM, SOCK_STREAM

import pytest

from ebpflb.datapath import conntrack_probe
from ebpflb.lab.hosts import Host
from ebpflb.lab.sockets import Socket
from ebpflb.model.packet_path import Engine
from ebpflb.node import ctnetlink
from ebpflb.options import Paths
from ebpflb.plan.connections import STATUS
from tests.kit import cluster, firewall, flood, requests
from tests.kit.cluster import NODEPORT, Cluster, endpoint, web
from tests.kit.conntrack_filler import full
from tests.load import scaled
from tests.node import nodes

FLOOD = Path(flood.__file__)
FORGED = {False: ("172.16.0.1", "172.16.0.0/12"), True: ("fd66::1", "fd66::/64")}
HALF_OPEN = 2048  # twice as many as bpf/engine/conntrack/evict.h leaves the time for an answer
LASTING = 3600  # seconds
EXCHANGES = 5  # after these conntrack has a stream for assured


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A node with the conntrack engine, and a router that drops what is sent to FORGED sources."""
    if missing := conntrack_probe.obstacle(Paths.cache):
        pytest.skip(missing)
    with cluster.running(tmp_path_factory.mktemp("full"), engine=Engine.CONNTRACK) as made:
        for _, addresses in FORGED.values():
            made.lab.router.ip(f"route add blackhole {addresses}")
        pods = made.web
        v6 = [endpoint(pod, v6=True) for pod in pods]
        made.publish(web(*map(endpoint, pods), v6=v6, nodeport=NODEPORT))
        yield made


@pytest.fixture(scope="module")
def outside(serving: Cluster) -> Iterator[Host]:
    """A client whose own namespace tracks connections too."""
    host = serving.lab.outside("outside", 1)
    for name in ("tcp_timeout_syn_sent", "udp_timeout"):
        host.sysctl(f"net.netfilter.nf_conntrack_{name}", LASTING)
    with firewall.rules(host, firewall.chain("output", "filter", "ct state new accept")):
        yield host


def established(serving: Cluster, outside: Host, kind: int, where: str) -> Socket:
    client = serving.sockets(outside).open(requests.family_of(where), kind)
    client.connect((where, NODEPORT))
    exchange(client)
    return client


def exchange(client: Socket) -> None:
    for _ in range(EXCHANGES):
        client.send(b"?")
        assert client.recv(64)


def half_open(host: Host) -> int:
    """Flows to the NodePort in the host's conntrack that are not established."""
    with nodes.entered(host.netns):
        found = ctnetlink.connections(lambda _, __, port: port == NODEPORT)
        return sum(not entry.status & STATUS["assured"] for entry in found)


@pytest.mark.parametrize("v6", [False, True], ids=["v4", "v6"])
@pytest.mark.parametrize("mode", ["many", "datagrams"], ids=["tcp", "udp"])
def test_only_half_open_flows_give_way(
    serving: Cluster, outside: Host, mode: str, v6: bool
) -> None:
    """In a table full of SYNs, or of single datagrams, every new client is served, and the old
    ones; the same flows stay where the flood comes from.
    """
    node, first = serving.node, FORGED[v6][0]
    where = node.v6 if v6 else node.v4
    clients = [established(serving, outside, kind, where) for kind in (SOCK_STREAM, SOCK_DGRAM)]
    with full(node, free=HALF_OPEN):
        words = where, str(NODEPORT), first, str(2 * HALF_OPEN)
        assert serving.lab.keep(outside.python(FLOOD, mode, *words)).wait() == 0
        assert half_open(node) < 1.1 * HALF_OPEN
        theirs = half_open(outside)
        assert theirs >= 2 * HALF_OPEN
        for protocol in ("tcp", "udp"):
            answers = serving.request(outside, protocol, where, NODEPORT, scaled(200))
            assert answers["errors"] == {}
        assert half_open(outside) >= theirs
        for client in clients:
            exchange(client)
            client.close()
