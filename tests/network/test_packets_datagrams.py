# SPDX-License-Identifier: Apache-2.0
"""A flow of datagrams keeps its endpoint as long as that serves: test_datagrams, by packets.

Where flows are to move tests wait for conntrack (tests.kit.moved_flows); the flow tables have moved
them with the change itself.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from ebpflb.lab.manifests import Manifest
from ebpflb.lab.sockets import Socket
from tests.kit import requests
from tests.kit.moved_flows import wait_until_only
from tests.kit.two_nodes import ENGINES, Frontends, TwoNodes
from tests.node import nodes

pytestmark = pytest.mark.parametrize("two", ENGINES, indirect=True)

LEAVING = {"ready": False, "terminating": True}


@pytest.fixture(params=[False, True], ids=["v4", "v6"])
def v6(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


@pytest.fixture(params=[("unhooked", "cluster"), ("outside", "nodeport")], ids=lambda each: each[0])
def talk(two: TwoNodes, v6: bool, request: pytest.FixtureRequest) -> Iterator[Socket]:
    """A datagram socket connected to a service of both endpoints."""
    who, kind = request.param
    two.delete_flows("other_flows")
    two.publish(two.service("web", 10, two.here, two.there))
    to = Frontends(10).to(kind, two.near, v6=v6)
    with requests.udp_socket(two.sockets(getattr(two, who)), to[0]) as client:
        client.connect(to)
        yield client


@pytest.fixture
def soon_forgotten(two: TwoNodes) -> Iterator[None]:
    """Conntrack keeps datagrams' flows for a second only, instead of two minutes."""
    timeouts = Path("/proc/sys/net/netfilter/nf_conntrack_udp_timeout_stream")
    with nodes.entered(two.near.netns):
        usual = timeouts.read_text()
        timeouts.write_text("1")
    yield
    with nodes.entered(two.near.netns):
        timeouts.write_text(usual)


def answers(client: Socket, times: int = 10) -> set[str]:
    """The backend that answers its datagrams."""
    found = set()
    for _ in range(times):
        client.send(b"?")
        found.add(requests.receive(client).name)
    return found


@pytest.mark.extended
def test_datagrams_keep(two: TwoNodes, talk: Socket) -> None:
    """All datagrams go to the endpoint of the first, while other endpoints come and go."""
    (name,) = answers(talk)
    two.publish(two.service("web", 10, getattr(two, name)))
    assert answers(talk) == {name}
    two.publish(two.service("web", 10, two.twin, two.here, two.there))
    assert answers(talk) == {name}


def test_datagrams_move(two: TwoNodes, talk: Socket) -> None:
    """When the endpoint is gone the flow goes to another."""
    (name,) = answers(talk)
    (other,) = {"here", "there"} - {name}
    two.publish(two.service("web", 10, getattr(two, other)))
    wait_until_only(two.near, talk.getsockname()[1], getattr(two, other))
    assert answers(talk) == {other}


def test_datagrams_stay_while_leaving(two: TwoNodes, talk: Socket) -> None:
    """An endpoint that terminates but serves keeps its flows; when it serves no more they move."""
    (name,) = answers(talk)
    (other,) = {"here", "there"} - {name}
    two.publish(leaving(two, name, other))
    assert answers(talk) == {name}
    two.publish(leaving(two, name, other, serving=False))
    wait_until_only(two.near, talk.getsockname()[1], getattr(two, other))
    assert answers(talk) == {other}


def leaving(two: TwoNodes, name: str, other: str, **conditions: bool) -> list[Manifest]:
    """The service with one endpoint that is leaving."""
    service, *slices = two.service("web", 10, getattr(two, other))
    for each, v6 in zip(slices, (False, True), strict=True):
        each["endpoints"] += two.endpoints(getattr(two, name), v6=v6, **LEAVING | conditions)
    return [service, *slices]


@pytest.mark.usefixtures("soon_forgotten")
def test_datagrams_to_nobody(two: TwoNodes, talk: Socket) -> None:
    """A flow whose last endpoint goes is refused; of conntrack once the client has paused for as
    long as conntrack keeps it, as with kube-proxy (kube-proxy.md 11.1).
    """
    answers(talk)
    two.publish(two.service("web", 10))
    wait_until_only(two.near, talk.getsockname()[1])
    with pytest.raises(ConnectionRefusedError):
        for _ in range(3):
            answers(talk)
