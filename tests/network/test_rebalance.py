# SPDX-License-Identifier: Apache-2.0
"""Connections move to an endpoint that comes later (docs/scheduling.md), with a real agent."""

import errno
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from ebpflb.model.annotations import REBALANCE_ANNOTATION
from tests.kit import needs, requests
from tests.kit.parameters import flow_tables
from tests.kit.two_nodes import Frontends, TwoNodes

pytestmark = flow_tables
WEB, BESIDE = Frontends(10), Frontends(20)
COUNT = 8
IDLE = "idle=1s,above=20%"
RESTS = 5.0  # seconds: the agent looks about each second
STAY = "connections stay: a new one could not be opened"


@pytest.fixture(scope="module", autouse=True)
def needed() -> None:
    needs.sock_destroy()


def web(
    two: TwoNodes, *pods: Host, name: str = "web", number: int = 10, value: str | None = IDLE
) -> list[Manifest]:
    """Return a Service whose idle connections move, unless there is no value."""
    made = two.service(name, number, *pods)
    made[0]["metadata"]["annotations"] = {REBALANCE_ANNOTATION: value} if value else {}
    made[0]["spec"]["ports"][0]["appProtocol"] = "http"
    return made


def beside(two: TwoNodes, *pods: Host) -> list[Manifest]:
    return web(two, *pods, name="beside", number=20, value=None)


class Client:
    """A connection that its owner opens again when it is ended; ``ended`` counts how often."""

    def __init__(self, two: TwoNodes, who: str, to: tuple[str, int]) -> None:
        self.two, self.who, self.to, self.ended = two, who, to, 0
        self.open()

    def open(self) -> None:
        sockets = self.two.sockets(getattr(self.two, self.who))
        self.socket, self.name = requests.connected(sockets, *self.to)

    def exchange(self) -> None:
        try:
            assert requests.lives(self.socket)
        except OSError as error:
            assert error.errno in (errno.ECONNABORTED, errno.EPIPE)
            self.ended += 1
            self.socket.close()
            self.open()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def clients(two: TwoNodes, stack: ExitStack, who: str, to: tuple[str, int]) -> list[Client]:
    made = [Client(two, who, to) for _ in range(COUNT)]
    stack.callback(lambda: [each.socket.close() for each in made])
    return made


@pytest.mark.parametrize(("who", "v6"), [("hooked", False), ("near", True)])
def test_idle_connections_move_to_a_new_endpoint(
    two: TwoNodes, stack: ExitStack, who: str, v6: bool
) -> None:
    """Those of another Service, which does not ask for it, stay, and so do those that are never
    used again. The metric counts what moved.
    """
    two.publish(web(two, two.here), beside(two, two.here))
    used = clients(two, stack, who, WEB.to("cluster", two.near, v6=v6))
    unused = clients(two, stack, who, WEB.to("cluster", two.near, v6=v6))
    others = clients(two, stack, who, BESIDE.to("cluster", two.near, v6=v6))
    for each in (*used, *unused, *others):
        each.exchange()
    two.publish(web(two, two.here, two.there), beside(two, two.here, two.there))

    def moved() -> bool:
        """Use each connection once, then let it rest for longer than it has to be idle."""
        for each in (*used, *others):
            each.exchange()
        time.sleep(RESTS)
        return {each.name for each in used} == {"here", "there"}

    wait_until("some have moved", moved)
    assert not sum(each.ended for each in (*unused, *others))
    assert all(requests.lives(each.socket) for each in unused)
    ended = sum(each.ended for each in used)
    (moved_total,) = (it for it in two.metrics() if it.startswith("ebpflb_connections_moved_total"))
    assert float(moved_total.split()[1]) >= ended > 0


def test_it_stops_when_a_new_connection_cannot_be_opened(two: TwoNodes, stack: ExitStack) -> None:
    """The log says so, and the connections stay."""
    two.publish(web(two, two.here))
    made = clients(two, stack, "hooked", WEB.to("cluster", two.near))
    broken = two.outside  # nothing listens there
    two.publish(web(two, two.here, broken))
    sockets, to = two.sockets(two.hooked), WEB.to("cluster", two.near)

    def is_said() -> bool:
        with requests.tcp_socket(sockets, to[0]) as client:
            client.settimeout(3.0)  # a SYN without an answer fails after one
            with suppress(OSError):
                client.connect(to)
        return STAY in two.agents[0].log()

    wait_until("it has stopped", is_said)
    assert all(requests.lives(each.socket) for each in made)
