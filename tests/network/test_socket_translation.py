# SPDX-License-Identifier: Apache-2.0
"""--socket-translation=host: pods see the service's address, and so do rules inside them."""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from ebpflb.kernel.maps.readers import RememberedSockets
from ebpflb.lab.agents import wait_until
from tests.kit import requests
from tests.kit.cluster import PORT, VIP, VIP6, Cluster, running
from tests.kit.parameters import every_kind, protocols
from tests.kit.requests import Send
from tests.kit.sockets import Sockets
from tests.kit.stale_udp import connect, dual_stack_web, exchange
from tests.kit.two_nodes import ENGINES, require

HOST_ONLY = ("--socket-translation", "host")
SIDECAR = 15001
services = pytest.mark.parametrize("vip", [VIP, VIP6], ids=["v4", "v6"])


@pytest.fixture(scope="module", params=ENGINES, ids=str)
def cluster(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """Named as the usual one, so that the sockets of ``pod`` and ``host`` are on it."""
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
    """As Istio's sidecar does: what the pod sends to the service goes to the sidecar."""
    rules = [
        f"{family} daddr {vip} {protocol} dport {PORT} redirect to :{SIDECAR}"
        for family, vip in (("ip", VIP), ("ip6", VIP6))
        for protocol in ("tcp", "udp")
    ]
    chain = "chain o {\ntype nat hook output priority -100;\n"
    cluster.client.nft(f"table inet mesh {{\n{chain}" + "\n".join(rules) + "\n}\n}\n")


def restart(cluster: Cluster, *options: str) -> None:
    """The agent with these options, on the same maps; it goes on where it has them."""
    agent = cluster.agent
    if agent.options == options:
        return
    agent.stop()
    agent.options = options
    agent.start()
    is_host_only = bool(options)
    wait_until(
        "the option is in force",
        lambda: ("host_sockets" in cluster.maps["settings"].get(0).flags) == is_host_only,
    )


@services
@protocols
def test_a_rule_inside_a_pod_sees_the_service(
    cluster: Cluster, served: None, pod: Sockets, vip: str, send: Send
) -> None:
    """A REDIRECT rule for the service's address takes what the pod sends there to its sidecar."""
    redirect(cluster)
    assert send(pod, vip).name == "sidecar"


@services
@every_kind
def test_served_at_the_pods_device(
    cluster: Cluster, served: None, sockets: Sockets, vip: str, send: Send
) -> None:
    """Without a rule pods are served by the packet path, and the node at its sockets."""
    answer = send(sockets, vip)
    assert (answer.name, answer.peer) == (cluster.web[0].name, (vip, PORT))


class Opened:
    """A pod's sockets of each kind that have been answered once by a service."""

    def __init__(self, pod: Sockets, vip: str, stack: ExitStack) -> None:
        self.vip = vip
        self.stream = stack.enter_context(requests.tcp_socket(pod, vip))
        self.connected = stack.enter_context(requests.udp_socket(pod, vip))
        self.loose = stack.enter_context(requests.udp_socket(pod, vip))
        self.stream.connect((vip, PORT))
        self.stream.recv(64)
        self.names = connect(self.connected, vip).name, requests.exchange(self.loose, vip).name

    def go_on(self, *, loose: bool) -> None:
        """Check that they go on with the same backends; an unconnected socket only if ``loose``."""
        self.stream.send(b"still there")
        assert self.stream.recv(64) == b"still there"
        assert self.stream.getpeername()[:2] == (self.vip, PORT)
        assert exchange(self.connected).name == self.names[0]
        if loose:
            assert requests.exchange(self.loose, self.vip).name == self.names[1]


@pytest.mark.extended
@pytest.mark.parametrize("to_host", [True, False], ids=["all to host", "host to all"])
def test_a_change_breaks_no_socket(
    cluster: Cluster, served: None, pod: Sockets, to_host: bool
) -> None:
    """Sockets from before the agent's restart with the other option go on, and leave nothing."""
    options = ((), HOST_ONLY) if to_host else (HOST_ONLY, ())
    restart(cluster, *options[0])
    cluster.publish(dual_stack_web(*cluster.web))
    before = remembered(cluster)
    with ExitStack() as stack:
        opened = [Opened(pod, vip, stack) for vip in (VIP, VIP6)]
        restart(cluster, *options[1])
        for each in opened:
            each.go_on(loose=to_host)
    wait_until("all is forgotten", lambda: remembered(cluster) <= before)
    restart(cluster, *HOST_ONLY)


def remembered(cluster: Cluster) -> set[object]:
    others = (cluster.maps[name].items() for name in ("assignments", "peers"))
    sockets = RememberedSockets(cluster.maps).items()
    return {*(cookie for cookie, _ in sockets), *(key for each in others for key, _ in each)}
