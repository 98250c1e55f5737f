# SPDX-License-Identifier: Apache-2.0
"""Connected UDP sockets of a backend that no longer serves are ended, and served when they connect
again (kube-proxy.md 11.1, 21.6; e2e conntrack.go); all others continue.
"""

from collections.abc import Callable, Iterable, Iterator

import pytest

from ebpflb.kernel.node import sock_diag
from ebpflb.lab import manifests
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from tests.kit import requests
from tests.kit.cluster import NODEPORT, PORT, TARGET, VIP, VIP6, Cluster
from tests.kit.parameters import families
from tests.kit.sockets import Socket, Sockets
from tests.kit.stale_udp import (
    SOURCE,
    Changes,
    bound_socket,
    connect,
    dual_stack,
    dual_stack_web,
    exchange,
    is_ended,
)

PLACES = {"v4": VIP, "v6": VIP6, "mapped": f"::ffff:{VIP}"}

pytestmark = pytest.mark.skipif(not sock_diag.can_destroy(), reason="this kernel ends no sockets")


@pytest.fixture(params=PLACES)
def vip(request: pytest.FixtureRequest) -> str:
    return PLACES[request.param]


@pytest.fixture
def client(sockets: Sockets, vip: str) -> Iterator[Socket]:
    with bound_socket(sockets, vip) as opened:
        yield opened


def test_udp_is_preserved_when_the_server_pod_cycles(
    cluster: Cluster, changes: Changes, client: Socket, vip: str
) -> None:
    """The client gets one error, that its socket was ended, and reaches the new pod."""
    one, other, _ = cluster.web
    changes.apply(dual_stack_web(one))
    assert connect(client, vip).name == one.name
    changes.apply(dual_stack_web(one, other))
    assert exchange(client).name == one.name
    changes.apply(dual_stack_web(other))
    assert is_ended(client)
    answer = connect(client, vip)
    assert (answer.name, answer.peer) == (other.name, (vip, PORT))
    assert client.getsockname()[1] == SOURCE
    assert exchange(client).name == other.name


# UDP is preserved when initial unready endpoints get ready (e2e conntrack.go): who asks before
# anyone serves is served afterwards.


@pytest.mark.parametrize("address", [VIP, VIP6])
def test_udp_connected_before_endpoints_reaches_them(
    cluster: Cluster, changes: Changes, pod: Sockets, address: str
) -> None:
    """A pod's socket that was connected before there were endpoints is served later, without a new
    connect().
    """
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
    """The node's socket gets an error, and reaches an endpoint when it connects again."""
    vip, node = (VIP6, cluster.node.v6) if v6 else (VIP, cluster.node.v4)
    address, port = (vip, PORT) if where == "cluster IP" else (node, NODEPORT)
    changes.apply(dual_stack_web(nodeport=NODEPORT))
    with requests.udp_socket(host, address) as early:
        early.connect((address, port))
        changes.publish(dual_stack_web(cluster.web[0], nodeport=NODEPORT))
        assert is_ended(early)
        assert connect(early, address, port).name == cluster.web[0].name


@pytest.fixture
def rule(cluster: Cluster) -> Iterator[Callable[[str], None]]:
    """Load a rule about the node's own packets."""
    head, tail = "table inet others {\nchain o {\ntype nat hook output priority 0;", "}\n}\n"
    yield lambda rule: cluster.node.nft(f"{head}\n{rule}\n{tail}")
    cluster.node.nft("table inet others\ndelete table inet others\n")


# What conntrack has of a frontend that was removed is deleted once more after a second, so these
# tests use cluster IPs that no test before had.
@pytest.mark.parametrize("cluster_ips", [("10.96.0.32", "fd00:96::31"), ("fd00:96::32",)])
def test_translated_by_others(
    cluster: Cluster,
    changes: Changes,
    host: Sockets,
    cluster_ips: tuple[str, ...],
    rule: Callable[[str], None],
) -> None:
    """A socket of the node that netfilter translates is served, and not ended."""
    changes.apply()
    pod, later = cluster.web[0], cluster_ips[0]
    family, to = ("ip6", f"[{pod.v6}]") if ":" in later else ("ip", pod.v4)
    rule(f"{family} daddr {later} udp dport {PORT} dnat {family} to {to}:{TARGET}")
    with requests.udp_socket(host, later) as client:
        assert connect(client, later).name == pod.name
        changes.apply(afterwards(pod, cluster_ips))
        assert exchange(client).name == pod.name


def afterwards(pod: Host, cluster_ips: Iterable[str]) -> list[Manifest]:
    """Publish a service at unused cluster IPs."""
    named, ends = [{"name": "udp", "port": TARGET, "protocol": "UDP"}], dual_stack(pod)
    return [
        manifests.service("later", [*cluster_ips], [{**named[0], "port": PORT}]),
        manifests.endpoint_slice("later", "IPv4", ends["v4"], named),
        manifests.endpoint_slice("later", "IPv6", ends["v6"], named),
    ]
