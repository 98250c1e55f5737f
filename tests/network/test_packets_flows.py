# SPDX-License-Identifier: Apache-2.0
"""Flows of packets from their beginning to their end: hairpins, affinity, what keeps them or not.

The packet path's counterparts of test_affinity and test_survival.
"""

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from socket import SO_REUSEADDR, SOL_SOCKET

import pytest

from ebpflb.datapath.maps.state_dir import StateDir
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from ebpflb.lab.sockets import Socket
from ebpflb.model.packet_path import Engine
from ebpflb.plan.flow_entries import Flow, FlowKind, Tuple, gather
from tests.kit import requests
from tests.kit.lab_cluster import TARGET
from tests.kit.on_removal import SOON, is_reset, saying
from tests.kit.requests import Send
from tests.kit.two_nodes import ENGINES, Frontends, TwoNodes, address

FRONTENDS, OTHER = Frontends(10), Frontends(20)
WITH_AFFINITY = {"sessionAffinity": "ClientIP"}

both_engines = pytest.mark.parametrize("two", ENGINES, indirect=True)
# With netfilter pods do not reach themselves without hairpin mode at the bridge's port
# (test_hairpin_mode), and without its entry conntrack goes on with a connection that it meets.
flow_tables = pytest.mark.parametrize("two", [Engine.FLOWS], indirect=True)

families = pytest.mark.parametrize("v6", [False, True], ids=["v4", "v6"])
protocols = pytest.mark.parametrize("send", [requests.tcp, requests.udp])
ways_in = pytest.mark.parametrize(
    ("who", "kind"), [("unhooked", "cluster"), ("outside", "nodeport")]
)
endpoints = pytest.mark.parametrize("pod", ["here", "there"])


@pytest.fixture(autouse=True)
def afresh(two: TwoNodes) -> None:
    two.delete_flows("other_flows")


def where(
    two: TwoNodes, kind: str, *, v6: bool, frontends: Frontends = FRONTENDS
) -> tuple[str, int]:
    return frontends.to(kind, two.near, v6=v6)


@pytest.mark.extended
@flow_tables
@families
@protocols
@pytest.mark.parametrize("kind", ["cluster", "nodeport", "external", "balancer"])
def test_hairpin(two: TwoNodes, kind: str, send: Send, v6: bool) -> None:
    """A pod reaches itself through its service, and sees its node as the client."""
    two.publish(two.service("web", 10, two.twin))
    answer = send(two.sockets(two.twin), *where(two, kind, v6=v6))
    assert (answer.name, answer.peer) == ("twin", where(two, kind, v6=v6))
    assert answer.source not in (two.twin.v4, two.twin.v6)


@both_engines
@families
@protocols
@ways_in
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


@pytest.fixture
def connections(two: TwoNodes) -> Iterator[list[Socket]]:
    """From every client to every endpoint, by both families; open before the test, and alive
    after it.
    """
    two.publish(two.service("a", 10, two.here), two.service("b", 20, two.there))
    made = [
        connected(two, who, where(two, kind, v6=v6, frontends=frontends))
        for v6 in (False, True)
        for who, kind in (
            ("unhooked", "cluster"),
            ("unhooked", "nodeport"),
            ("outside", "nodeport"),
        )
        for frontends in (FRONTENDS, OTHER)
    ]
    yield made
    assert all(map(lives, made))
    for each in made:
        each.close()


def connected(two: TwoNodes, who: str, to: tuple[str, int]) -> Socket:
    client = requests.tcp_socket(two.sockets(getattr(two, who)), to[0])
    client.connect(to)
    client.recv(64)
    return client


def lives(client: Socket) -> bool:
    client.send(b"still there?")
    return bool(client.recv(64) == b"still there?")


@both_engines
def test_endpoints_leave(two: TwoNodes, connections: list[Socket]) -> None:
    """Connections stay when the endpoints leave, and when the services go."""
    two.publish(two.service("a", 10), two.service("b", 20))
    assert all(map(lives, connections))
    two.publish()


@pytest.mark.extended
@both_engines
@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_agents_end(two: TwoNodes, connections: list[Socket], how: signal.Signals) -> None:
    """Without agents connections stay and new ones land; new agents go on from there."""
    for agent in two.agents:
        agent.stop(how)
    assert all(map(lives, connections))
    assert requests.tcp(two.sockets(two.outside), *where(two, "nodeport", v6=False)).name == "here"
    for agent in two.agents:
        agent.start()


def upgrade(two: TwoNodes, how: signal.Signals = signal.SIGTERM) -> None:
    """The maps are those of another layout, which agrees about persistent ones; agents come."""
    for agent in two.agents:
        agent.stop(how)
        state = StateDir(agent.paths.state)
        state.maps_directory.rename(state.directory / "0123456789ab")
        agent.start()
        assert state.old_layouts() == []
    two.close_maps()


@pytest.mark.extended
@both_engines
def test_upgrade(two: TwoNodes, connections: list[Socket]) -> None:
    """Connections live on through another layout of settings, devices or verdicts."""
    upgrade(two)
    for v6 in (False, True):
        to = where(two, "nodeport", v6=v6)
        assert requests.tcp(two.sockets(two.outside), *to).name == "here"
        assert requests.tcp(two.sockets(two.unhooked), *where(two, "cluster", v6=v6)).name == "here"


@pytest.fixture
def pressed(two: TwoNodes) -> Iterator[None]:
    """By clients of every kind; none of their connections and datagrams may fail.

    With pauses: a masqueraded flow keeps its source port for a while, and there are 10,000.
    On netfilter TCP alone: a datagram's reply is lost if its endpoint goes before it comes, as the
    entry goes too, with kube-proxy as well (kube-proxy.md 11.1).
    """
    two.publish(two.service("web", 10, two.here, two.there))
    pressing = [
        two.start_client(getattr(two, who), protocol, *where(two, kind, v6=v6), pause=0.01)
        for who, kind in (("unhooked", "cluster"), ("outside", "nodeport"))
        for protocol in ("tcp", "udp")
        if protocol == "tcp" or two.engine is Engine.FLOWS
        for v6 in (False, True)
    ]
    yield
    for said in map(two.stop_client, pressing):
        assert not said["errors"]
        assert said["names"].keys() == {"here", "there"}


@pytest.mark.extended
@both_engines
def test_restarts_under_load(two: TwoNodes, pressed: None) -> None:
    """While agents come and go nothing fails."""
    for how in (signal.SIGKILL, signal.SIGTERM):
        for agent in two.agents:
            agent.stop(how)
            agent.start()


@pytest.mark.extended
@both_engines
def test_upgrades_under_load(two: TwoNodes, pressed: None) -> None:
    """The same with another layout each time."""
    for how in (signal.SIGKILL, signal.SIGTERM):
        upgrade(two, how)


@both_engines
def test_churn(two: TwoNodes, pressed: None) -> None:
    """While endpoints come and go nothing fails."""
    sets: list[tuple[Host, ...]] = [(two.here,), (two.there,), (two.here, two.there)]
    for _ in range(20):
        for pods in sets:
            two.publish(two.service("web", 10, *pods))


@both_engines
@families
@ways_in
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


@flow_tables
@families
@endpoints
@pytest.mark.parametrize("kind", ["external", "balancer"])
def test_connection_without_its_flow_is_reset(two: TwoNodes, pod: str, kind: str, v6: bool) -> None:
    """A connection whose flow is gone is reset: its packets are not routed back."""
    two.publish(two.service("web", 10, getattr(two, pod)))
    with connected(two, "outside", where(two, kind, v6=v6)) as client:
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
@pytest.mark.parametrize(("who", "kind"), [("unhooked", "cluster"), ("outside", "nodeport")])
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
@pytest.mark.parametrize("v6", [False, True], ids=["v4", "v6"])
def test_a_client_that_is_its_own_endpoint_is_reset_when_it_goes(two: TwoNodes, v6: bool) -> None:
    """With on-removal: reset; both of its sockets are told."""
    two.publish(saying(two.service("a", 10, two.twin), SOON))
    with connected(two, "twin", Frontends(10).to("cluster", two.near, v6=v6)) as client:
        two.publish(saying(two.service("a", 10, two.here), SOON))
        assert is_reset(client)
