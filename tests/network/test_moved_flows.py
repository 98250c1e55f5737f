# SPDX-License-Identifier: Apache-2.0
"""On the engine netfilter a UDP flow is moved by its own next datagram, without a search."""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from ipaddress import ip_address

import pytest

from bench import conntrack_filler
from ebpflb.agent.stale import PASS_TIMES
from ebpflb.entries.flows import Ends
from ebpflb.lab.agents import wait_until
from ebpflb.lab.hosts import Host
from ebpflb.lab.manifests import Manifest
from ebpflb.model.services import Protocol
from tests.kernel.node import nodes
from tests.kit import requests
from tests.kit.lab_cluster import TARGET
from tests.kit.moved_flows import wait_until_only
from tests.kit.parameters import families, netfilter
from tests.kit.sockets import Socket
from tests.kit.two_nodes import Frontends, TwoNodes, address

pytestmark = netfilter

FRONTENDS = Frontends(10)


@pytest.fixture
def client(two: TwoNodes, v6: bool) -> Iterator[Socket]:
    """Return a socket outside whose flow leads to the pod ``here``."""
    two.publish(two.service("web", 10, two.here))
    to = FRONTENDS.to("nodeport", two.near, v6=v6)
    with requests.udp_socket(two.sockets(two.outside), to[0]) as opened:
        opened.settimeout(1)
        opened.connect(to)
        assert ask(opened) == "here"
        yield opened


def ask(client: Socket) -> str:
    """Return who answers; "" if the entry was deleted before the answer came back."""
    client.send(b"?")
    try:
        return requests.receive(client).name
    except TimeoutError:
        return ""


@families
def test_an_entry_that_comes_after_the_searches(two: TwoNodes, client: Socket, v6: bool) -> None:
    """An entry of a removed endpoint is deleted when its flow continues, even if no search follows.

    A CPU that was stopped during the change may create such an entry late.
    """
    two.publish(two.service("web", 10, two.there))
    wait_until_only(two.near, client.getsockname()[1], two.there)
    time.sleep(sum(PASS_TIMES) + 0.5)
    to, port = FRONTENDS.to("nodeport", two.near, v6=v6)
    ends = Ends(ip_address(address(two.outside, to)), ip_address(to), client.getsockname()[1], port)
    removed, node = address(two.here, to), ip_address(address(two.near, to))
    with nodes.entered(two.near.netns):
        conntrack_filler.forge(Protocol.UDP, ends, (ip_address(removed), TARGET), node)
    wait_until("the other endpoint answers", lambda: ask(client) == "there")


def of_udp(two: TwoNodes, name: str, number: int, *pods: Host) -> list[Manifest]:
    """Return a UDP Service with these endpoints, for IPv4 only."""
    service, slice, _ = two.one_port(name, number, two.here, TARGET, "UDP")
    return [service, slice | {"endpoints": two.endpoints(*pods)}]


def test_an_id_that_was_free_when_the_agent_was_killed(two: TwoNodes, opened: ExitStack) -> None:
    """The sockets of a Service never reach another Service's endpoint, even if that endpoint is the
    first one after a start that found no backend with the last given ids.
    """
    two.publish(of_udp(two, "a", 10, two.here, two.there), of_udp(two, "b", 20))
    to = FRONTENDS.to("nodeport", two.near)
    sockets = [
        opened.enter_context(requests.udp_socket(two.sockets(two.outside), to[0])) for _ in range(8)
    ]
    for each in sockets:
        each.settimeout(1)
        each.connect(to)
    assert {ask(each) for each in sockets} == {"here", "there"}
    two.publish(of_udp(two, "a", 10, two.there), of_udp(two, "b", 20))
    for each in sockets:
        wait_until_only(two.near, each.getsockname()[1], two.there)
    two.agents[0].stop(signal.SIGKILL)
    two.agents[0].start()
    two.publish(of_udp(two, "a", 10, two.there), of_udp(two, "b", 20, two.here))
    assert [ask(each) for each in sockets] == ["there"] * len(sockets)
