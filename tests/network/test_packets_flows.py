# SPDX-License-Identifier: Apache-2.0
"""Flows of packets: affinity, and what keeps or ends them; test_survival has what all survive."""

from contextlib import ExitStack
from socket import SO_REUSEADDR, SOL_SOCKET
from typing import Any

import pytest

from ebpflb.lab.hosts import Host
from ebpflb.model.packet_path import Engine
from tests.kit import requests
from tests.kit.lab_cluster import TARGET
from tests.kit.parameters import both_engines, families, packet_clients, protocols
from tests.kit.requests import Send, lives
from tests.kit.two_nodes import Frontends, TwoNodes, address

FRONTENDS, OTHER = Frontends(10), Frontends(20)
WITH_AFFINITY: dict[str, Any] = {"sessionAffinity": "ClientIP"}


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


# Without its entry conntrack goes on with a connection that it meets.


@both_engines
@families
@endpoints
@packet_clients
def test_one_port_two_services(two: TwoNodes, who: str, kind: str, pod: str, v6: bool) -> None:
    """A client may connect to one endpoint by two frontends, and directly, from one port."""
    end: Host = getattr(two, pod)
    two.publish(two.service("a", 10, end), two.service("b", 20, end))
    targets = [where(two, kind, v6=v6), where(two, kind, v6=v6, frontends=OTHER)]
    # Outside no route leads to pods. In the flow tables packets within a bridge look alike.
    if who == "unhooked" and (pod == "there" or two.engine is Engine.NETFILTER):
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
