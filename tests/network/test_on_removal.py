# SPDX-License-Identifier: Apache-2.0
"""What becomes of connections when their endpoint goes: on-removal, of sockets and of packets."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from socket import SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET

import pytest

from ebpflb.kernel.node import sock_diag
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from ebpflb.model.packet_path import Engine
from tests.kit import requests
from tests.kit.lab_cluster import TARGET
from tests.kit.on_removal import (
    LATE,
    LEAVING,
    SOON,
    held,
    is_reset,
    one_each,
    saying,
    terminating,
)
from tests.kit.parameters import both_engines, families, flow_tables
from tests.kit.requests import connected, lives
from tests.kit.sockets import Socket
from tests.kit.two_nodes import Frontends, TwoNodes

WEB, BESIDE = Frontends(10), Frontends(20)

ends_sockets = pytest.mark.skipif(
    not sock_diag.can_destroy_tcp(), reason="this kernel ends no sockets"
)


def by_sockets(*where: str) -> object:
    return pytest.param(*where, marks=ends_sockets)


clients = pytest.mark.parametrize("who", [by_sockets("hooked"), by_sockets("near"), "unhooked"])


@pytest.fixture
def stack(two: TwoNodes) -> Iterator[ExitStack]:
    two.delete_flows("tcp_flows")
    with ExitStack() as made:
        yield made


def web(two: TwoNodes, value: str | None, *pods: Host) -> list[Manifest]:
    """The Service with these endpoints, which says this of their removal."""
    return saying(two.service("web", 10, *pods), value)


def beside(two: TwoNodes, pod: Host, value: str | None = SOON) -> list[Manifest]:
    """Another Service: when its endpoint goes its connections are reset at once, which shows that
    the search is over.
    """
    return saying(two.service("beside", 20, pod), value)


def open_each(
    two: TwoNodes, stack: ExitStack, who: str, *names: str, to: Frontends = WEB
) -> dict[str, Socket]:
    """Connections of a client by the cluster IP, one to each of these endpoints."""
    sockets, where = two.sockets(getattr(two, who)), to.to("cluster", two.near)
    return one_each(stack, lambda: connected(sockets, *where), *names)


@pytest.mark.extended
@both_engines
@pytest.mark.parametrize("family", ["v4", "v6", "mapped"])
@pytest.mark.parametrize(
    ("who", "kind"),
    [
        by_sockets("hooked", "cluster"),
        by_sockets("near", "cluster"),
        ("unhooked", "cluster"),
        ("unhooked", "nodeport"),
        ("outside", "nodeport"),
        ("outside", "balancer"),
    ],
)
def test_reset_ends_the_connections_of_endpoints_that_go(
    two: TwoNodes, stack: ExitStack, who: str, kind: str, family: str
) -> None:
    """Of clients that only wait, and at the endpoints: on this node, on another; masqueraded or
    not. Others live: to an endpoint that stays, and to the address of one that goes.
    """
    two.publish(web(two, SOON, two.here, two.twin, two.there))
    sockets = two.sockets(getattr(two, who))
    address, port = WEB.to(kind, two.near, v6=family == "v6")
    address = f"::ffff:{address}" if family == "mapped" else address
    found = one_each(stack, lambda: connected(sockets, address, port), "here", "twin", "there")
    direct = []
    if who != "outside":  # from where no route leads to pods
        itself = two.twin.v6 if family == "v6" else two.twin.v4
        direct.append(stack.enter_context(connected(sockets, itself, TARGET)[0]))
    two.publish(web(two, SOON, two.here))
    assert is_reset(found["twin"])
    assert is_reset(found["there"])
    wait_until("one endpoint is told", lambda: held(two.twin) == len(direct))
    wait_until("the other is told", lambda: held(two.there) == 0)
    assert all(map(lives, [found["here"], *direct]))


@both_engines
@families
@pytest.mark.parametrize("kind", ["cluster", "nodeport"])
def test_reset_ends_the_connection_of_a_pod_to_itself(
    two: TwoNodes, stack: ExitStack, kind: str, v6: bool
) -> None:
    """Hairpin: client and endpoint are one pod, whose socket and whose server both are told."""
    if two.engine is Engine.NETFILTER:  # it needs this (test_hairpin_mode.py)
        two.near.ip("link set veth12 type bridge_slave hairpin on")
    two.publish(web(two, SOON, two.twin))
    client, name = connected(two.sockets(two.twin), *WEB.to(kind, two.near, v6=v6))
    stack.enter_context(client)
    assert (name, lives(client), held(two.twin)) == ("twin", True, 1)
    two.publish(web(two, SOON, two.here))
    assert is_reset(client)
    wait_until("the endpoint is told", lambda: held(two.twin) == 0)


@both_engines
@families
def test_a_client_of_an_endpoint_that_is_dead_notices_while_it_waits_or_sends(
    two: TwoNodes, stack: ExitStack, v6: bool
) -> None:
    """Nothing acknowledges what it has sent; no one answers one that is connecting."""
    two.publish(web(two, SOON, two.there))
    sockets, to = two.sockets(two.unhooked), WEB.to("cluster", two.near, v6=v6)
    waits, sends = (stack.enter_context(connected(sockets, *to)[0]) for _ in range(2))
    with silenced(two.there):
        sends.send(bytes(20_000))
        two.publish(web(two, SOON, two.here))
        assert is_reset(waits)
        assert is_reset(sends)


@both_engines
@clients
@pytest.mark.parametrize("value", [None, "keep", "drop", LATE])
def test_connections_are_kept_unless_their_grace_is_over(
    two: TwoNodes, stack: ExitStack, who: str, value: str | None
) -> None:
    """They are kept by default, by choice, with a wrong annotation, which is named once, and within
    the grace.
    """
    said = 'metadata.annotations[ebpflb.io/on-removal]: "drop" is not keep, reset or reset=DURATION'
    two.publish(web(two, None, two.here, two.twin))  # the same warning again would not be named
    before = two.agents[0].log().count(said)
    two.publish(web(two, value, two.here, two.twin), beside(two, two.there))
    kept = open_each(two, stack, who, "here")["here"]
    other = open_each(two, stack, who, "there", to=BESIDE)["there"]
    two.publish(web(two, value, two.twin), beside(two, two.twin))
    assert is_reset(other)
    assert lives(kept)
    assert two.agents[0].log().count(said) - before == (value == "drop")


@both_engines
@clients
def test_connections_end_before_a_terminating_endpoint_is_killed(
    two: TwoNodes, stack: ExitStack, who: str
) -> None:
    """While it still serves: it is told too. Others live, and a new connection goes to them."""
    pods = two.here, two.twin, two.there
    two.publish(web(two, LEAVING, *pods))
    found = open_each(two, stack, who, "here", "twin", "there")
    two.publish(terminating(web(two, LEAVING, *pods), two.twin))
    assert is_reset(found["twin"])
    wait_until("the endpoint is told", lambda: held(two.twin) == 0)
    assert all(map(lives, [found["here"], found["there"]]))
    names = {connected(two.sockets(getattr(two, who)), *WEB.to("cluster", two.near))[1]}
    assert names <= {"here", "there"}
    wait_until("it is logged", lambda: "reset: it is terminating" in two.agents[0].log())


@both_engines
@clients
def test_a_terminating_endpoint_keeps_its_connections_while_no_other_is_ready(
    two: TwoNodes, stack: ExitStack, who: str
) -> None:
    """It gets new ones too. When another is ready they are reset, if it is late enough."""
    two.publish(web(two, LEAVING, two.here), beside(two, two.there))
    kept = open_each(two, stack, who, "here")["here"]
    other = open_each(two, stack, who, "there", to=BESIDE)["there"]
    leaving = terminating(web(two, LEAVING, two.here), two.here)
    two.publish(leaving, beside(two, two.twin))
    assert is_reset(other)
    assert lives(kept)
    two.publish(terminating(web(two, LEAVING, two.here, two.twin), two.here))
    assert is_reset(kept)


@both_engines
def test_a_client_may_connect_again_from_the_same_port(two: TwoNodes, stack: ExitStack) -> None:
    """To an endpoint that serves."""
    to = WEB.to("cluster", two.near)
    two.publish(web(two, SOON, two.there))
    client, _ = connected(two.sockets(two.unhooked), *to)
    port = client.getsockname()[1]
    two.publish(web(two, SOON, two.here))
    assert is_reset(client)
    client.close()
    log = two.agents[0].log
    wait_until("it is logged", lambda: "1 flows" in log() or "1 conntrack" in log())

    def reaches_another() -> bool:
        with two.sockets(two.unhooked).open(requests.family_of(to[0]), SOCK_STREAM) as again:
            try:
                again.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)  # a former attempt may still close
                again.bind(("0.0.0.0", port))
                again.connect(to)
                return bool(again.recv(64).startswith(b"here "))
            except OSError:
                return False

    wait_until("the port is free", reaches_another)


@contextmanager
def silenced(pod: Host) -> Iterator[None]:
    """Silence a pod as if it had died: no packet leaves it."""
    for v6 in (False, True):
        pod.ip("rule add pref 1 blackhole", v6=v6)
    try:
        yield
    finally:
        for v6 in (False, True):
            pod.ip("rule del pref 1", v6=v6)


# The rest is the same for packets, and is shown by sockets alone.


@flow_tables
@ends_sockets
@pytest.mark.parametrize("kind", ["cluster", "nodeport", "loopback"])
def test_every_frontend_of_a_service_that_is_deleted(
    two: TwoNodes, stack: ExitStack, kind: str
) -> None:
    """Its endpoints go with it. The same endpoint in another Service keeps its connections."""
    same = beside(two, two.here, None)
    two.publish(web(two, SOON, two.here), same)
    where = ("127.0.0.1", WEB.nodeport) if kind == "loopback" else WEB.to(kind, two.near)
    client = stack.enter_context(two.connected("near", where))
    other = open_each(two, stack, "near", "here", to=BESIDE)["here"]
    two.publish(same)
    assert is_reset(client)
    assert lives(other)


@flow_tables
@ends_sockets
def test_operators_see_the_setting_the_log_the_counter_and_the_history(
    two: TwoNodes, stack: ExitStack
) -> None:
    """In `services`, `status` and `history`."""
    two.publish(web(two, SOON, two.here, two.twin))
    assert "reset=0s" in two.ebpflb("services", "get", "default/web").stdout
    line = "  reset on removal     default/web:tcp: after 0 s\n"
    wait_until("status has it", lambda: line in two.ebpflb("status").stdout)
    client = open_each(two, stack, "hooked", "here")["here"]
    two.publish(web(two, SOON, two.twin))
    assert is_reset(client)
    said = f"default/web:tcp: 1 sockets to {two.here.v4} port {TARGET} reset"
    wait_until("it is logged", lambda: said in two.agents[0].log())
    event = f"reset: 1 sockets to {two.here.v4}:{TARGET}"
    wait_until("history has it", lambda: event in two.ebpflb("history", "-o", "wide").stdout)
