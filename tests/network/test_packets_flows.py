# SPDX-License-Identifier: Apache-2.0
"""Flows of packets: affinity, and what keeps or ends them; test_survival has what all survive."""

from contextlib import ExitStack
from socket import SO_REUSEADDR, SOL_SOCKET

import pytest

from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from ebpflb.plan.flow_entries import Flow, FlowKind, Tuple, gather
from tests.kit import requests
from tests.kit.lab_cluster import TARGET
from tests.kit.on_removal import SOON, is_reset, saying
from tests.kit.parameters import both_engines, families, flow_tables, packet_clients, protocols
from tests.kit.requests import Send, lives
from tests.kit.two_nodes import Frontends, TwoNodes, address

FRONTENDS, OTHER = Frontends(10), Frontends(20)
WITH_AFFINITY = {"sessionAffinity": "ClientIP"}

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
    two.publish(two.service("web", 10, getattr(two, pod)))
    end: Host = getattr(two, pod)
    far_end = requests.tcp_socket(two.sockets(end), "::" if v6 else "")
    far_end.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
    far_end.bind(("::" if v6 else "0.0.0.0", TARGET + 1))
    far_end.listen(1)
    two.publish(moved(two.service("web", 10, end), TARGET + 1))
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


def moved(said: list[Manifest], port: int) -> list[Manifest]:
    """The same service with its endpoints on another port."""
    for each in said[1:]:
        for its in each["ports"]:
            its["port"] = port
    return said


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


@flow_tables
@families
def test_a_client_that_is_its_own_endpoint_is_reset_when_it_goes(two: TwoNodes, v6: bool) -> None:
    """With on-removal: reset; both of its sockets are told."""
    two.publish(saying(two.service("a", 10, two.twin), SOON))
    with two.connected("twin", Frontends(10).to("cluster", two.near, v6=v6)) as client:
        two.publish(saying(two.service("a", 10, two.here), SOON))
        assert is_reset(client)
