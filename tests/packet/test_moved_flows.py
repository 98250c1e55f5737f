# SPDX-License-Identifier: Apache-2.0
"""UDP flows on the engine netfilter whose backend no longer serves are reported to the agent.

Conntrack would lead their datagrams to the former backend until the agent deletes its entry.
"""

from collections.abc import Callable, Iterator
from contextlib import closing

import pytest

from ebpflb.entries.services import NO_SLOT
from ebpflb.kernel.maps.readers import Ring
from tests.packet.frames import at, datagram
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import serve

Reported = Callable[[], list[tuple[str, int]]]


@pytest.fixture(params=[True, False], ids=["flows unknown", "no flows"])
def node(node: PacketNode, request: pytest.FixtureRequest) -> PacketNode:
    """Return a node without flows: most packets are handled by their tuple (path/repeated.h)."""
    node.settings("detect_local", "netfilter")
    node.put("flow_gate", 0, (0, 0 if request.param else 1, 0))
    return node


@pytest.fixture
def reported(node: PacketNode) -> Iterator[Reported]:
    """Return the addresses and ports of the clients that were reported since the last call."""
    with closing(Ring(node.maps["moved_flows"])) as ring:

        def clients() -> list[tuple[str, int]]:
            return [(str(each.source), each.source_port) for each in ring.take_values()]

        clients()
        yield clients


def remove(node: PacketNode, *backends: str) -> None:
    for backend in backends:
        node.put("backend_slots", node.backend_id(1, backend), NO_SLOT)


def test_a_flow_is_reported_once(node: PacketNode, places: Places, reported: Reported) -> None:
    """The first datagram after the backend was removed reports the flow; later datagrams do not."""
    old, new = at(places.there, 1), at(places.there, 2)
    where = serve(node, places, "cluster", "udp", cluster=[old])
    request = datagram(at(places.pod, 50123), where)
    node.ingress(request, "pods")
    serve(node, places, "cluster", "udp", cluster=[new])
    node.ingress(datagram(at(places.pod, 50124), where), "pods")
    assert reported() == []
    remove(node, old)
    for _ in range(3):
        node.ingress(request, "pods")
        node.ingress(datagram(at(places.pod, 50124), where), "pods")
    assert reported() == [(places.pod, 50123)]


def test_a_flow_is_reported_once_somebody_serves(
    node: PacketNode, places: Places, reported: Reported
) -> None:
    """While no backend serves conntrack's entry stays, as with kube-proxy (kube-proxy.md 11.1)."""
    old, new = at(places.there, 1), at(places.there, 2)
    where = serve(node, places, "cluster", "udp", cluster=[old])
    request = datagram(at(places.pod, 50123), where)
    node.ingress(request, "pods")
    remove(node, old)
    serve(node, places, "cluster", "udp", cluster=[])
    node.ingress(request, "pods")
    assert reported() == []
    serve(node, places, "cluster", "udp", cluster=[new])
    node.ingress(request, "pods")
    assert reported() == [(places.pod, 50123)]


@pytest.mark.parametrize("service", [1, 2])
def test_a_frontend_moves_to_another_service(
    node: PacketNode, places: Places, service: int, reported: Reported
) -> None:
    """Flows of the frontend are reported; flows of a frontend that stays are not."""
    old, new = at(places.there, 1), at(places.there, 2)
    where = serve(node, places, "cluster", "udp", cluster=[old])
    request = datagram(at(places.pod, 50123), where)
    node.ingress(request, "pods")
    node.publish(2, {}, cluster=[new])
    backend = {1: old, 2: new}[service]
    serve(node, places, "cluster", "udp", service=service, cluster=[backend])
    node.settings("detect_local", "netfilter", frontend_moves=7)
    node.ingress(request, "pods")
    assert reported() == ([(places.pod, 50123)] if service == 2 else [])


def test_the_id_is_another_services(node: PacketNode, places: Places, reported: Reported) -> None:
    """A flow is also reported if its backend's id was given to another service's backend in
    between.
    """
    old, new, stranger = (at(places.there, port) for port in (1, 2, 3))
    where = serve(node, places, "cluster", "udp", cluster=[old])
    request = datagram(at(places.pod, 50123), where)
    node.ingress(request, "pods")
    serve(node, places, "cluster", "udp", cluster=[new])
    node.ids[2, stranger] = node.backend_id(1, old)
    node.publish(2, {}, cluster=[stranger])
    for _ in range(2):
        node.ingress(request, "pods")
    assert reported() == [(places.pod, 50123)]


def test_a_flow_that_was_idle(node: PacketNode, places: Places, reported: Reported) -> None:
    """A flow that chooses again because it was silent is not reported while its backend serves."""
    where = serve(node, places, "cluster", "udp", cluster=[at(places.there, 1)])
    request = datagram(at(places.pod, 50123), where)
    node.ingress(request, "pods")
    node.settings("detect_local", "netfilter", udp_timeout=0)
    node.forget_recent()
    node.ingress(request, "pods")
    assert reported() == []
