# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to endpoints and agents, open connections continue and new ones succeed. This
holds for sockets and for packets, with each engine.
"""

import signal
from collections.abc import Iterator

import pytest

from ebpflb.lab.hosts import Host
from ebpflb.model.packet_path import Engine
from tests.kit import monitors, requests
from tests.kit.parameters import both_engines
from tests.kit.requests import lives
from tests.kit.sockets import Socket
from tests.kit.two_nodes import Frontends, TwoNodes

pytestmark = [both_engines, pytest.mark.usefixtures("started_anew")]

FRONTENDS, OTHER = Frontends(10), Frontends(20)
WAYS = [
    ("hooked", "cluster"),
    ("near", "cluster"),
    ("unhooked", "cluster"),
    ("unhooked", "nodeport"),
    ("outside", "nodeport"),
]
BY_PACKETS = ("unhooked", "outside")
every_end = pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])


@pytest.fixture(autouse=True)
def afresh(two: TwoNodes) -> None:
    two.delete_flows("other_flows")


@pytest.fixture
def connections(two: TwoNodes) -> Iterator[list[Socket]]:
    """Open connections from every client to every endpoint, in both families; check after the test
    that they are still open, with the same peer.
    """
    two.publish(two.service("a", 10, two.here), two.service("b", 20, two.there))
    places = [
        (who, frontends.to(kind, two.near, v6=v6))
        for v6 in (False, True)
        for who, kind in WAYS
        for frontends in (FRONTENDS, OTHER)
    ]
    made = [two.connected(who, to) for who, to in places]
    yield made
    assert all(map(lives, made))
    assert [each.getpeername()[:2] for each in made] == [to for _, to in places]
    for each in made:
        each.close()


def lands(two: TwoNodes) -> bool:
    """Whether new connections of every client reach the endpoint of the first Service."""
    return all(
        requests.tcp(two.sockets(getattr(two, who)), *FRONTENDS.to(kind, two.near, v6=v6)).name
        == "here"
        for who, kind in WAYS
        for v6 in (False, True)
    )


@pytest.mark.extended
@every_end
def test_agent_ends(two: TwoNodes, connections: list[Socket], how: signal.Signals) -> None:
    """Without agents open connections continue and the same programs serve new ones; new agents go
    on from there, and replace the programs hook by hook.
    """
    before = monitors.programs(two.agents[0])
    for agent in two.agents:
        agent.stop(how)
    assert monitors.programs(two.agents[0]) == before
    assert all(map(lives, connections))
    assert lands(two)
    for agent in two.agents:
        agent.start()
    assert lands(two)
    after = monitors.programs(two.agents[0])
    assert after.keys() == before.keys()
    assert not set(after.values()) & set(before.values())


@pytest.fixture
def pressed(two: TwoNodes) -> Iterator[None]:
    """Let clients of every kind ask during the block; none of their connections and datagrams may
    fail.

    They pause, because a masqueraded flow keeps its source port for a while, and there are 10,000
    ports. With netfilter, clients whose packets are translated use TCP only: a datagram's reply is
    lost if its endpoint is removed before the reply, because the entry is removed too, as with
    kube-proxy (kube-proxy.md 11.1).
    """
    two.publish(two.service("web", 10, two.here, two.there))
    pressing = [
        two.start_client(
            getattr(two, who), protocol, *FRONTENDS.to(kind, two.near, v6=v6), pause=0.01
        )
        for who, kind in WAYS
        for protocol in ("tcp", "udp")
        if protocol == "tcp" or two.engine is Engine.FLOWS or who not in BY_PACKETS
        for v6 in (False, True)
    ]
    yield
    for said in map(two.stop_client, pressing):
        assert not said["errors"]
        assert said["names"].keys() == {"here", "there"}


@pytest.mark.extended
def test_restart_under_load(two: TwoNodes, pressed: None) -> None:
    """Nothing fails while agents are restarted."""
    for how in (signal.SIGKILL, signal.SIGTERM):
        for agent in two.agents:
            agent.stop(how)
            agent.start()


def test_nothing_fails_as_endpoints_change(two: TwoNodes, pressed: None) -> None:
    """Nothing fails while endpoints are added and removed."""
    sets: list[tuple[Host, ...]] = [(two.here,), (two.there,), (two.here, two.there)]
    for _ in range(20):
        for pods in sets:
            two.publish(two.service("web", 10, *pods))


def test_changed_while_away(two: TwoNodes) -> None:
    """Changes made while no agent ran are in force after the next start."""
    two.publish(two.service("web", 10, two.there))
    for agent in two.agents:
        agent.stop(signal.SIGKILL)
    two.publish(two.service("web", 10, two.here))
    for who in ("hooked", "unhooked"):
        names = requests.backends(two.sockets(getattr(two, who)), FRONTENDS.cluster[0], 5)
        assert names.keys() == {"there"}
    for agent in two.agents:
        agent.start()
    assert lands(two)
