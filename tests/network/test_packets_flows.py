# SPDX-License-Identifier: Apache-2.0
"""Flows of packets: affinity, and what keeps or ends them; test_survival has what all survive."""

from collections.abc import Iterator
from contextlib import ExitStack
from socket import SO_REUSEADDR, SOL_SOCKET
from typing import Any

import pytest

from ebpflb.lab.hosts import Host
from ebpflb.plan.flow_entries import Flow, FlowKind, Tuple, gather
from tests.kit import requests
from tests.kit.lab_cluster import TARGET
from tests.kit.parameters import both_engines, families, flow_tables, packet_clients, protocols
from tests.kit.requests import Send, lives
from tests.kit.two_nodes import Frontends, TwoNodes, address

FRONTENDS, OTHER = Frontends(10), Frontends(20)
WITH_AFFINITY: dict[str, Any] = {"sessionAffinity": "ClientIP"}

PORTS = range(20_000, 20_064)
NETWORKS = {False: "203.0.113.0/24", True: "fd03:113::/64"}

endpoints = pytest.mark.parametrize("pod", ["here", "there"])


@pytest.fixture(autouse=True)
def afresh(two: TwoNodes) -> None:
    two.delete_flows("other_flows")


def where(
    two: TwoNodes, kind: str, *, v6: bool, frontends: Frontends = FRONTENDS
) -> tuple[str, int]:
    return frontends.to(kind, two.near, v6=v6)


@both_engines
@families
@protocols
@packet_clients
def test_affinity(two: TwoNodes, who: str, kind: str, send: Send, v6: bool) -> None:
    """With session affinity a client comes to one endpoint, by every address; without, to all."""
    two.publish(two.service("web", 10, two.here, two.there, **WITH_AFFINITY))
    client, every = two.sockets(getattr(two, who)), ("nodeport", "external", "balancer", kind)
    ways = [where(two, each, v6=v6) for each in every]
    assert len({send(client, *way).name for way in ways for _ in range(10)}) == 1
    two.publish(two.service("web", 10, two.here, two.there))
    two.delete_flows("other_flows")
    found = requests.backends(client, ways[-1][0], send=send, port=ways[-1][1])
    assert found.keys() == {"here", "there"}


@both_engines
@families
@packet_clients
@endpoints
def test_half_closed(two: TwoNodes, who: str, kind: str, pod: str, v6: bool) -> None:
    """A client that has shut down its side still receives all that the endpoint sends."""
    end: Host = getattr(two, pod)
    far_end = requests.tcp_socket(two.sockets(end), "::" if v6 else "")
    far_end.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
    far_end.bind(("::" if v6 else "0.0.0.0", TARGET + 1))
    far_end.listen(1)
    two.publish(two.one_port("web", 10, end, TARGET + 1))
    to = where(two, kind, v6=v6)
    with requests.tcp_socket(two.sockets(getattr(two, who)), to[0]) as client, far_end:
        client.connect(to)
        served, _ = far_end.accept()
        client.shutdown(1)
        assert served.recv(1) == b""
        for word in (b"one", b"two"):
            served.send(word)
            assert client.recv(64) == word
        served.close()
        assert client.recv(1) == b""


# Without its entry conntrack goes on with a connection that it meets.
@flow_tables
@families
@endpoints
@pytest.mark.parametrize("kind", ["external", "balancer"])
def test_connection_without_its_flow_is_reset(two: TwoNodes, pod: str, kind: str, v6: bool) -> None:
    """A connection whose flow is gone is reset: its packets are not routed back."""
    two.publish(two.service("web", 10, getattr(two, pod)))
    with two.connected("outside", where(two, kind, v6=v6)) as client:
        flows = two.maps_of(two.agents[0])["tcp_flows"]
        flows.delete([packet for packet, _ in flows.items()])
        with pytest.raises(ConnectionResetError):
            lives(client)


@both_engines
@families
@endpoints
@packet_clients
def test_one_port_two_services(two: TwoNodes, who: str, kind: str, pod: str, v6: bool) -> None:
    """A client may connect to one endpoint by two frontends, and directly, from one port."""
    end: Host = getattr(two, pod)
    two.publish(two.service("a", 10, end), two.service("b", 20, end))
    targets = [where(two, kind, v6=v6), where(two, kind, v6=v6, frontends=OTHER)]
    if who == "unhooked":  # outside no route leads to pods
        targets.append((address(end, targets[0][0]), TARGET))
    with ExitStack() as stack:
        opened = [
            stack.enter_context(requests.tcp_socket(two.sockets(getattr(two, who)), targets[0][0]))
        ]
        opened += [
            stack.enter_context(requests.tcp_socket(opened[0].sockets, to)) for to, _ in targets[1:]
        ]
        for each in opened:
            each.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
            each.bind(("", opened[0].getsockname()[1]))
        for each, to in zip(opened, targets, strict=True):
            each.connect(to)
        assert all(each.recv(64).startswith(pod.encode()) for each in opened)
        assert all(map(lives, opened))


def alone(two: TwoNodes) -> list[tuple[Tuple, Flow]]:
    """The entries that no other entry refers to, but for ports of closed flows, which rest."""
    entries = dict(two.maps["tcp_flows"].items())
    return [
        (key, flow)
        for key, flow in entries.items()
        if flow.kind != FlowKind.RESTING and len(gather(key, flow, entries.get)) < 2
    ]


@flow_tables
@families
def test_one_port_by_frontends_in_turn(two: TwoNodes, v6: bool) -> None:
    """Connections from one port by a NodePort and by a cluster IP leave no entry alone.

    An entry without its flow would be swept after an hour.
    """
    two.publish(two.service("a", 10, two.here))
    two.delete_flows("tcp_flows")
    sockets = two.sockets(two.unhooked)
    port = None
    for kind in ("nodeport", "cluster") * 3:
        to = where(two, kind, v6=v6)
        with requests.tcp_socket(sockets, to[0]) as client:
            client.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
            client.bind(("", port or 0))
            port = client.getsockname()[1]
            client.connect(to)
            assert client.recv(64).startswith(b"here")
            client.shutdown(1)
            assert client.recv(1) == b""
    assert alone(two) == []


@both_engines
@families
def test_connections_stay_when_their_client_is_excluded(two: TwoNodes, v6: bool) -> None:
    """From loadBalancerSourceRanges (kube-proxy.md 7)."""
    own, nobody = (two.outside.v6, "fd99::") if v6 else (two.outside.v4, "240.0.0.0")

    def admit(source: str) -> None:
        sources = [f"{source}/{128 if v6 else 32}"]
        two.publish(two.service("web", 10, two.here, loadBalancerSourceRanges=sources))

    admit(own)
    with two.connected("outside", where(two, "balancer", v6=v6)) as client:
        admit(nobody)
        assert lives(client)


@pytest.fixture
def routed_back(two: TwoNodes) -> Iterator[None]:
    """In the end the router leads external addresses to the near node again."""
    yield
    for network in NETWORKS.values():
        two.lab.router.lead(network, address(two.near, network))


def drawn(two: TwoNodes, node_name: str, v6: bool) -> list[str]:
    """The endpoint that each source port of a client gets at this node; no earlier flow counts."""
    two.delete_flows("other_flows")
    network, where = NETWORKS[v6], FRONTENDS.to("external", two.near, v6=v6)
    two.lab.router.lead(network, address(getattr(two, node_name), network))
    names = []
    for port in PORTS:
        with requests.udp_socket(two.sockets(two.outside), where[0]) as client:
            client.bind((two.outside.v6 if v6 else two.outside.v4, port))
            names.append(requests.exchange(client, *where).name)
    return names


@pytest.mark.extended
@both_engines
@families
def test_two_nodes_draw_independently_for_the_same_ports(
    two: TwoNodes, routed_back: None, v6: bool
) -> None:
    """Each draws by its own secret: what a client learns at one node says nothing of another, and
    at one node it stays the same. So no client can choose its endpoint by its source port.
    """
    two.publish(two.service("web", 10, two.here, two.there))
    near, far = drawn(two, "near", v6), drawn(two, "far", v6)
    agreeing = sum(a == b for a, b in zip(near, far, strict=True))
    assert 8 < agreeing < 56  # 32 of 64 by chance; less or more once in 10^9 times
    assert set(near) == set(far) == {"here", "there"}
    assert drawn(two, "near", v6) == near
