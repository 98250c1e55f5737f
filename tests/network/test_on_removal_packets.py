# SPDX-License-Identifier: Apache-2.0
"""What becomes of connections of the packet path when their endpoint goes: on-removal."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from socket import IPPROTO_TCP, SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET

import pytest

from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.model.packet_path import Engine
from ebpflb.node.sock_diag import SockDiag
from tests.kit import requests
from tests.kit.lab_cluster import TARGET
from tests.kit.on_removal import LATE, SHORT, SOON, connected, is_reset, lives, one_each, saying
from tests.kit.two_nodes import ENGINES, Frontends, TwoNodes
from tests.node import nodes

WEB = Frontends(10)
BESIDE = Frontends(20)

pytestmark = pytest.mark.parametrize("two", ENGINES, indirect=True)
families = pytest.mark.parametrize("v6", [False, True], ids=["v4", "v6"])


@pytest.fixture
def stack(two: TwoNodes) -> Iterator[ExitStack]:
    two.delete_flows("tcp_flows")
    with ExitStack() as made:
        yield made


def held(pod: Host) -> int:
    """How many connections the endpoint has."""
    with nodes.entered(pod.netns), SockDiag() as diag:
        return sum(one.local[1] == TARGET for one in diag.connected(IPPROTO_TCP))


@pytest.mark.extended
@families
@pytest.mark.parametrize(
    "who, kind",
    [
        ("unhooked", "cluster"),
        ("unhooked", "nodeport"),
        ("outside", "nodeport"),
        ("outside", "balancer"),
    ],
)
def test_reset_ends_the_connections_of_endpoints_that_go(
    two: TwoNodes, stack: ExitStack, who: str, kind: str, v6: bool
) -> None:
    """Of clients that only wait, and at the endpoints: on this node, on another; masqueraded
    or not. One to an endpoint that stays lives.
    """
    two.publish(saying(two.service("web", 10, two.here, two.twin, two.there), SOON))
    sockets, to = two.sockets(getattr(two, who)), WEB.to(kind, two.near, v6=v6)
    found = one_each(stack, lambda: connected(sockets, *to), "here", "twin", "there")
    two.publish(saying(two.service("web", 10, two.here), SOON))
    assert is_reset(found["twin"])
    assert is_reset(found["there"])
    wait_until("the endpoints are told", lambda: held(two.twin) == held(two.there) == 0)
    assert lives(found["here"])


@families
@pytest.mark.parametrize("kind", ["cluster", "nodeport"])
def test_reset_ends_the_connection_of_a_pod_to_itself(
    two: TwoNodes, stack: ExitStack, kind: str, v6: bool
) -> None:
    """Hairpin: client and endpoint are one pod, whose socket and whose server both are told."""
    if two.engine is Engine.NETFILTER:  # it needs this (test_hairpin_mode.py)
        two.near.ip("link set veth12 type bridge_slave hairpin on")
    two.publish(saying(two.service("web", 10, two.twin), SOON))
    client, name = connected(two.sockets(two.twin), *WEB.to(kind, two.near, v6=v6))
    stack.enter_context(client)
    assert (name, lives(client), held(two.twin)) == ("twin", True, 1)
    two.publish(saying(two.service("web", 10, two.here), SOON))
    assert is_reset(client)
    wait_until("the endpoint is told", lambda: held(two.twin) == 0)


@families
def test_a_client_of_an_endpoint_that_is_dead_notices_while_it_waits_or_sends(
    two: TwoNodes, stack: ExitStack, v6: bool
) -> None:
    """Nothing acknowledges what it has sent; nobody answers one that is connecting."""
    two.publish(saying(two.service("web", 10, two.there), SOON))
    sockets, to = two.sockets(two.unhooked), WEB.to("cluster", two.near, v6=v6)
    waits, sends = (stack.enter_context(connected(sockets, *to)[0]) for _ in range(2))
    with silenced(two.there):
        sends.send(bytes(20_000))
        two.publish(saying(two.service("web", 10, two.here), SOON))
        assert is_reset(waits)
        assert is_reset(sends)


@pytest.mark.parametrize("value", [None, "keep", LATE])
def test_connections_are_kept_unless_their_grace_is_over(
    two: TwoNodes, stack: ExitStack, value: str | None
) -> None:
    """Beside them those of a Service that are reset show that the search is over. The connection to
    the endpoint's own address lives whatever the Service says.
    """
    sockets = two.sockets(two.unhooked)
    beside = saying(two.service("beside", 20, two.here), SOON)
    two.publish(saying(two.service("web", 10, two.here), value), beside)
    kept, other = (
        stack.enter_context(connected(sockets, *it.to("cluster", two.near))[0])
        for it in (WEB, BESIDE)
    )
    direct = stack.enter_context(connected(sockets, two.here.v4, TARGET)[0])
    two.publish(
        saying(two.service("web", 10, two.twin), value),
        saying(two.service("beside", 20, two.twin), SOON),
    )
    assert is_reset(other)
    assert lives(kept)
    assert lives(direct)


def test_an_endpoint_that_comes_back_within_the_grace_keeps_its_connections(
    two: TwoNodes, stack: ExitStack
) -> None:
    """One that goes after it is reset, when the first one's grace would be over too."""
    sockets, to = two.sockets(two.unhooked), WEB.to("cluster", two.near)
    everybody = two.here, two.twin, two.there
    two.publish(saying(two.service("web", 10, *everybody), SHORT))
    found = one_each(stack, lambda: connected(sockets, *to), "here", "there")
    for pods in (everybody[1:], everybody, everybody[:2]):
        two.publish(saying(two.service("web", 10, *pods), SHORT))
    assert is_reset(found["there"])
    assert lives(found["here"])


def test_a_client_may_connect_again_from_the_same_port(two: TwoNodes, stack: ExitStack) -> None:
    """To an endpoint that serves."""
    to = WEB.to("cluster", two.near)
    two.publish(saying(two.service("web", 10, two.there), SOON))
    client, _ = connected(two.sockets(two.unhooked), *to)
    port = client.getsockname()[1]
    two.publish(saying(two.service("web", 10, two.here), SOON))
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
                return again.recv(64).startswith(b"here ")
            except OSError:
                return False

    wait_until("the port is free", reaches_another)


@contextmanager
def silenced(pod: Host) -> Iterator[None]:
    """As if it had died: nothing leaves it."""
    for family in ("-4", "-6"):
        change_rule(pod, family, "add")
    try:
        yield
    finally:
        for family in ("-4", "-6"):
            change_rule(pod, family, "del")


def change_rule(pod: Host, family: str, what: str) -> None:
    rule = ("blackhole",) if what == "add" else ()
    assert pod.start(["ip", family, "rule", what, "pref", "1", *rule]).wait() == 0
