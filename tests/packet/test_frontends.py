# SPDX-License-Identifier: Apache-2.0
"""Request and reply through every kind of frontend: a client never learns of the backend."""

import pytest

from tests.packet.frames import at, destination, ends, host_of, opening, port_of, reply, source
from tests.packet.node import FIRST_PORT, LAST_PORT, PacketNode
from tests.packet.places import Places
from tests.packet.services import KINDS, exchange, serve


@pytest.fixture(params=list(KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def test_cluster_ip_from_pod(node: PacketNode, places: Places, protocol: str) -> None:
    """A pod's request reaches the backend as the pod's own; the cluster IP answers."""
    backend, pod = at(places.there, 8080), at(places.pod, 50123)
    where = serve(node, places, "cluster", protocol, cluster=[backend])
    request = exchange(node, protocol, pod, where, "pods", "uplink")
    assert ends(request) == f"{pod} > {backend}"


def test_external(node: PacketNode, places: Places, protocol: str, kind: str) -> None:
    """A client outside is masqueraded on the way to another node, and sees the frontend alone."""
    if kind == "cluster":
        node.settings("masquerade_all")
    backend, client = at(places.there, 8080), at(places.client, 50123)
    where = serve(node, places, kind, protocol, cluster=[backend])
    request = node.through(opening(protocol, client, where))
    assert destination(request) == backend
    assert host_of(source(request)) == places.node
    assert FIRST_PORT <= port_of(source(request)) <= LAST_PORT
    for _ in range(2):
        answer = node.through(reply(request))
        assert ends(answer) == f"{where} > {client}"
        assert ends(node.through(reply(answer, "A"))) == ends(request)


def test_verdicts(node: PacketNode, places: Places, protocol: str) -> None:
    """Each step counts what it was: chosen, masqueraded, established."""
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.there, 8080)])
    first = opening(protocol, at(places.client, 50123), where)
    came = node.ingress(first)
    left = node.egress(came.packet)
    back = node.ingress(reply(left.packet))
    home = node.egress(back.packet)
    steps = [came, left, back, home, node.ingress(first), node.egress(came.packet)]
    established = [{"established": 1}] * 4
    assert [step.verdicts for step in steps] == [
        {"translated": 1},
        {"masqueraded": 1},
        *established,
    ]
    assert node.maps["service_stats"].get(1)[0] == 1


def test_same_port(node: PacketNode, places: Places, protocol: str) -> None:
    """If frontend and backend have the same port, only addresses change."""
    backend, pod = at(places.there, 80), at(places.pod, 50123)
    where = serve(node, places, "cluster", protocol, cluster=[backend])
    request = exchange(node, protocol, pod, where, "pods", "uplink")
    assert ends(request) == f"{pod} > {backend}"


def test_device_without_address(node: PacketNode, places: Places, protocol: str) -> None:
    """A flow that must be masqueraded is dropped at a device that has no address for it."""
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.there, 8080)])
    came = node.ingress(opening(protocol, at(places.client, 50123), where))
    left = node.egress(came.packet, "tunnel")
    assert (left.action, left.verdicts) == ("drop", {"ports_exhausted": 1})
    assert destination(node.egress(came.packet, "uplink").packet) == at(places.there, 8080)


def test_service_before_node_port(node: PacketNode, places: Places, protocol: str) -> None:
    """A service's address on this node wins over a NodePort of the same number."""
    numbers = {1: at(places.any, 30080), 2: at(places.node, 30080)}
    for number, where in numbers.items():
        frontends = {f"{where}/{protocol}": "external"}
        node.publish(number, frontends, cluster=[at(places.there, number)])
    request = opening(protocol, at(places.client, 50123), at(places.node, 30080))
    assert destination(node.ingress(request).packet) == at(places.there, 2)


def test_nobody_asked(node: PacketNode, places: Places, protocol: str) -> None:
    """Traffic between others, even to a backend, passes both hooks unchanged."""
    serve(node, places, "cluster", protocol, cluster=[at(places.there, 8080)])
    request = opening(protocol, at(places.pod, 50123), at(places.there, 8080))
    for one in (request, reply(request)):
        assert node.ingress(one) == ("pass", bytes(one), {"passed": 1})
        assert node.egress(one)[:2] == ("pass", bytes(one))
    assert not node.flows(protocol)
