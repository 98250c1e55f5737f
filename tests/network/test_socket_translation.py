# SPDX-License-Identifier: Apache-2.0
"""--socket-translation=host: pods, and rules inside them, see the service's address."""

from collections.abc import Iterator

import pytest

from tests.kit.cluster import PORT, VIP, VIP6, Cluster, running
from tests.kit.parameters import every_kind, protocols
from tests.kit.requests import Send
from tests.kit.sockets import Sockets
from tests.kit.stale_udp import dual_stack_web
from tests.kit.two_nodes import ENGINES, require

HOST_ONLY = ("--socket-translation", "host")
SIDECAR = 15001
services = pytest.mark.parametrize("vip", [VIP, VIP6], ids=["v4", "v6"])


@pytest.fixture(scope="module", params=ENGINES, ids=str)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Yield a cluster under the usual name, so that ``pod`` and ``host`` use it."""
    require(request.param)
    with running(tmp_path_factory.mktemp("cluster"), *HOST_ONLY, engine=request.param) as made:
        made.start_program(made.client, "serve", "sidecar", str(SIDECAR))
        yield made


@pytest.fixture
def served(cluster: Cluster) -> Iterator[None]:
    cluster.publish(dual_stack_web(cluster.web[0]))
    yield
    cluster.client.nft("table inet mesh\ndelete table inet mesh\n")


def redirect(cluster: Cluster) -> None:
    """Send the pod's packets for the service to a sidecar, as Istio does."""
    rules = [
        f"{family} daddr {vip} {protocol} dport {PORT} redirect to :{SIDECAR}"
        for family, vip in (("ip", VIP), ("ip6", VIP6))
        for protocol in ("tcp", "udp")
    ]
    chain = "chain o {\ntype nat hook output priority -100;\n"
    cluster.client.nft(f"table inet mesh {{\n{chain}" + "\n".join(rules) + "\n}\n}\n")


@services
@protocols
def test_a_rule_inside_a_pod_sees_the_service(
    cluster: Cluster, served: None, pod: Sockets, vip: str, send: Send
) -> None:
    """A REDIRECT rule for the service's address leads the pod's packets to its sidecar."""
    redirect(cluster)
    assert send(pod, vip).name == "sidecar"


@services
@every_kind
def test_served_at_the_pods_device(
    cluster: Cluster, served: None, sockets: Sockets, vip: str, send: Send
) -> None:
    """Without a rule the packet path serves pods, and socket hooks the node."""
    answer = send(sockets, vip)
    assert (answer.name, answer.peer) == (cluster.web[0].name, (vip, PORT))
