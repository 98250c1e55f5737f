# SPDX-License-Identifier: Apache-2.0
"""Where the kernel cannot end sockets: pods' flows are rebound to another backend."""

import logging
import socket
from ipaddress import ip_address
from typing import Any

import pytest

from ebpflb.agent.stale_udp import socket_search, worker
from ebpflb.agent.stale_udp.socket_search import StaleFlow
from ebpflb.agent.stale_udp.worker import SearchKind
from ebpflb.model.addresses import Address
from ebpflb.plan.flow_entries import gather, reverse
from tests.agent.stale_udp.world import (
    ELSEWHERE,
    HERE,
    OLD,
    REPLACED,
    World,
    error_of,
    replaced,
    settle,
)
from tests.kernel.attach.device_namespace import Namespace
from tests.kernel.variants import eventually, needs_root

pytestmark = needs_root


@pytest.fixture
def unable(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> World:
    """As on a kernel that cannot end sockets; the client is in a pod that this node routes."""
    monkeypatch.setattr(socket_search, "are_neighbours", lambda *_: False)
    caplog.set_level(logging.INFO)
    world.worker.ender.can_end, world.away = False, True
    return world


def flow_of(world: World, client: socket.socket) -> Any:
    return world.maps["other_flows"].get(stale_flow(world, client).request)


def stale_flow(world: World, client: socket.socket) -> StaleFlow:
    here: tuple[Address, int] = HERE, client.getsockname()[1]
    return StaleFlow(here, (HERE, world.port))


def test_rebound(unable: World) -> None:
    """A pod's flow is rebound to a backend that serves, not masqueraded; its socket stays."""
    counts = list[int]()
    unable.worker.on_search = lambda family, seconds, count: counts.append(count)
    client, direct = unable.remember(unable.direct()), unable.direct()
    (way_back, former), _ = stale_flow(unable, client).entries(ELSEWHERE, 5).items()
    unable.maps["other_flows"].write([(reverse(way_back), former)])
    unable.worker.check(REPLACED)
    assert eventually(lambda: flow_of(unable, client) is not None)
    settle(unable)
    asked, flows = stale_flow(unable, client).request, unable.maps["other_flows"]
    found = gather(asked, flow_of(unable, client), flows.get)
    assert found == dict(flows.items())
    assert len(found) == 2
    assert (flow_of(unable, client).address, flow_of(unable, client).backend) == (
        ELSEWHERE.address,
        ELSEWHERE.id,
    )
    assert error_of(client) == error_of(direct) == 0
    assert unable.known
    assert sum(counts) == 1


def test_rebound_again(unable: World) -> None:
    """When that backend is removed too, the flow is rebound again, though no counter shows it."""
    client = unable.remember(unable.direct())
    unable.worker.check(REPLACED)
    assert eventually(lambda: flow_of(unable, client) is not None)
    settle(unable)
    unable.count(OLD, 0, 0)
    third = ELSEWHERE._replace(address=ip_address("10.244.9.10"), id=30)
    unable.serve(third)
    unable.worker.check(replaced(ELSEWHERE.id, by=third.id))
    assert eventually(lambda: getattr(flow_of(unable, client), "backend", None) == 30)
    settle(unable)
    assert len(dict(unable.maps["other_flows"].items())) == 2


def test_rebound_to_the_next(unable: World) -> None:
    """If another flow of the client's port has the same reply tuple, the next backend is taken."""
    client = unable.remember(unable.direct())
    second = ELSEWHERE._replace(address=ip_address("10.244.9.10"), id=30)
    unable.serve(ELSEWHERE, second)
    here = stale_flow(unable, client)
    (way_back, other), _ = here.entries(ELSEWHERE, 5).items()
    taken = other._replace(address=ip_address("10.96.0.99"))
    unable.maps["other_flows"].write([(way_back, taken)])
    unable.worker.check(REPLACED)
    assert eventually(lambda: flow_of(unable, client) is not None)
    assert flow_of(unable, client).backend == 30
    assert unable.maps["other_flows"].get(way_back) == taken


@pytest.mark.parametrize("hairpin", [False, True], ids=["the node's own", "to itself"])
def test_not_rebound(unable: World, hairpin: bool, caplog: pytest.LogCaptureFixture) -> None:
    """The node's own flows, and those that would go to their client, stay, which is logged."""
    unable.away = hairpin
    if hairpin:
        unable.serve(ELSEWHERE._replace(address=HERE))
    client = unable.remember(unable.direct())
    unable.worker.check(REPLACED)
    settle(unable)
    assert flow_of(unable, client) is None
    assert "UDP sockets still connected to a removed backend: 1" in caplog.text


def renewed_often(unable: World, monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """A client whose flow was opened for it, and is renewed many times a second."""
    monkeypatch.setattr(socket_search, "RENEWAL", 0.0)
    monkeypatch.setattr(worker, "RENEWAL", 0.05)
    client = unable.remember(unable.direct())
    unable.worker.check(REPLACED)
    assert eventually(lambda: flow_of(unable, client) is not None)
    return client


def test_renewed(unable: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle flow is renewed while its socket is open, and left to the sweeper after it."""
    client = renewed_often(unable, monkeypatch)
    flows, asked = unable.maps["other_flows"], stale_flow(unable, client).request
    begun = flow_of(unable, client)
    assert eventually(lambda: flow_of(unable, client).last_seen > begun.last_seen)
    reply = next(flow for key, flow in flows.items() if key != asked)
    assert eventually(lambda: max(f.last_seen for _, f in flows.items()) > reply.last_seen)
    client.close()
    bound = unable.worker.ender.rebinder.backends
    kinds = {SearchKind.EVERYTHING}
    assert eventually(lambda: not bound and {it.kind for it in unable.worker.searches} <= kinds)


def test_renewed_without_its_reply(unable: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry of a flow's replies, which the LRU evicted, is there again with the renewal."""
    client = renewed_often(unable, monkeypatch)
    flows = unable.maps["other_flows"]
    way_back = stale_flow(unable, client).reply(ELSEWHERE.address, ELSEWHERE.port)
    reply = flows.get(way_back)
    flows.delete([way_back])
    assert eventually(lambda: flows.get(way_back) is not None)
    assert flows.get(way_back)._replace(last_seen=0) == reply._replace(last_seen=0)


def test_not_among_neighbours(unable: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flow between pods on a bridge stays: it is sent to the removed backend's MAC address."""
    monkeypatch.undo()
    client = unable.remember(unable.direct())
    unable.worker.check(REPLACED)
    settle(unable)
    assert flow_of(unable, client) is None


def test_neighbours(ns: Namespace) -> None:
    """Neighbours are reached by the same device; an unreachable address has no neighbours."""
    for words in (
        "link set lo up",
        "link set br0 up",
        "link set w0 up",
        "addr add 10.9.0.1/24 dev br0",
        "addr add 10.8.0.1/24 dev w0",
        "addr add fd09::1/64 dev br0",
    ):
        ns.run(f"ip {words}")
    first, second, third, far = map(ip_address, ("10.9.0.2", "10.9.0.3", "10.8.0.2", "192.0.2.9"))
    assert socket_search.are_neighbours(first, second)
    assert socket_search.are_neighbours(ip_address("fd09::2"), ip_address("fd09::3"))
    assert not socket_search.are_neighbours(first, third)
    assert not socket_search.are_neighbours(first, far)
    assert not socket_search.are_neighbours(far, far)
