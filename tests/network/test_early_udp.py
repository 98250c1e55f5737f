# SPDX-License-Identifier: Apache-2.0
"""UDP is preserved when initial unready endpoints get ready (e2e conntrack.go): who asks before
anyone serves is served afterwards.
"""

from collections.abc import Callable, Iterator

import pytest

from ebpflb.kernel.node import sock_diag
from ebpflb.lab import manifests
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from ebpflb.lab.sockets import Sockets
from tests.kit import requests
from tests.kit.cluster import NODEPORT, PORT, TARGET, VIP, VIP6, Cluster, endpoint, web
from tests.kit.parameters import families
from tests.kit.stale_udp import (
    Changes,
    bound_socket,
    connect,
    dual_stack,
    dual_stack_web,
    exchange,
    is_ended,
)

LATER = {"v4": "10.96.0.30", "v6": "fd00:96::30"}

pytestmark = pytest.mark.skipif(not sock_diag.can_destroy(), reason="this kernel ends no sockets")


def test_udp_is_preserved_when_endpoints_get_ready(
    cluster: Cluster, changes: Changes, sockets: Sockets
) -> None:
    """A client is refused while there is no endpoint, and reaches it afterwards."""
    changes.apply(web(endpoint(cluster.web[0], ready=False, serving=False)))
    with bound_socket(sockets, VIP) as early, pytest.raises(ConnectionRefusedError):
        early.connect((VIP, PORT))
        early.send(b"?")
        early.recv(64)
    changes.apply(dual_stack_web(cluster.web[0]))
    with bound_socket(sockets, VIP) as client:
        assert connect(client, VIP).name == cluster.web[0].name


@pytest.mark.parametrize("address", [VIP, VIP6])
def test_udp_connected_before_endpoints_reaches_them(
    cluster: Cluster, changes: Changes, pod: Sockets, address: str
) -> None:
    """A pod's socket that is connected before anyone serves is served afterwards, as it is."""
    changes.apply(dual_stack_web())
    with requests.udp_socket(pod, address) as early:
        early.connect((address, PORT))
        changes.publish(dual_stack_web(cluster.web[0]))
        answer = exchange(early)
        assert (answer.name, answer.peer) == (cluster.web[0].name, (address, PORT))
        assert exchange(early).name == cluster.web[0].name


@pytest.mark.parametrize("where", ["cluster IP", "node port"])
@families
def test_udp_of_the_node_connected_before_endpoints_is_ended(
    cluster: Cluster, changes: Changes, host: Sockets, where: str, v6: bool
) -> None:
    """The node's own socket hears that it has ended, and reaches them when it connects again."""
    vip, node = (VIP6, cluster.node.v6) if v6 else (VIP, cluster.node.v4)
    address, port = (vip, PORT) if where == "cluster IP" else (node, NODEPORT)
    changes.apply(dual_stack_web(nodeport=NODEPORT))
    with requests.udp_socket(host, address) as early:
        early.connect((address, port))
        changes.publish(dual_stack_web(cluster.web[0], nodeport=NODEPORT))
        assert is_ended(early)
        assert connect(early, address, port).name == cluster.web[0].name


@pytest.fixture(params=LATER)
def later(request: pytest.FixtureRequest) -> str:
    """A cluster IP that no service has yet."""
    return LATER[request.param]


@pytest.fixture
def rule(cluster: Cluster) -> Iterator[Callable[[str], None]]:
    """Loads a rule about what the node itself sends."""
    head, tail = "table inet others {\nchain o {\ntype nat hook output priority 0;", "}\n}\n"
    yield lambda rule: cluster.node.nft(f"{head}\n{rule}\n{tail}")
    cluster.node.nft("table inet others\ndelete table inet others\n")


@pytest.mark.parametrize("tracked", [False, True])
def test_udp_is_preserved_when_asked_too_early(
    cluster: Cluster,
    changes: Changes,
    pod: Sockets,
    host: Sockets,
    later: str,
    tracked: bool,
    rule: Callable[[str], None],
) -> None:
    """A socket connected to a cluster IP that no service had yet is served once one has it.

    A pod's datagrams are translated at its device; the node's own socket is ended.
    """
    changes.apply()
    if tracked:
        rule("ct state new accept")
    with bound_socket(pod, later) as early, bound_socket(host, later) as lost:
        for client in (early, lost):
            client.connect((later, PORT))
            client.send(b"?")
        changes.publish(afterwards(cluster.web[0]))
        assert exchange(early).name == cluster.web[0].name
        assert is_ended(lost)
        assert connect(lost, later).name == cluster.web[0].name


def test_translated_by_others(
    cluster: Cluster,
    changes: Changes,
    host: Sockets,
    later: str,
    rule: Callable[[str], None],
) -> None:
    """The node's own socket that netfilter translates is served: it goes on."""
    changes.apply()
    pod = cluster.web[0]
    family, to = ("ip6", f"[{pod.v6}]") if ":" in later else ("ip", pod.v4)
    rule(f"{family} daddr {later} udp dport {PORT} dnat {family} to {to}:{TARGET}")
    with requests.udp_socket(host, later) as client:
        assert connect(client, later).name == pod.name
        changes.apply(afterwards(pod))
        assert exchange(client).name == pod.name


def afterwards(pod: Host) -> list[Manifest]:
    """A service at the cluster IPs that no service had."""
    named, ends = [{"name": "udp", "port": TARGET, "protocol": "UDP"}], dual_stack(pod)
    return [
        manifests.service("later", [*LATER.values()], [{**named[0], "port": PORT}]),
        manifests.endpoint_slice("later", "IPv4", ends["v4"], named),
        manifests.endpoint_slice("later", "IPv6", ends["v6"], named),
    ]
