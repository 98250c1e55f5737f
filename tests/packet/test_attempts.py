# SPDX-License-Identifier: Apache-2.0
"""TCP connections of the packet path that open, fail, or get no answer, on both engines.

With netfilter the kernel's NAT has translated a reply before the program at egress sees it.
"""

from collections.abc import Callable
from typing import Any

import pytest

from ebpflb.kernel.maps.records import BackendHealth, ServiceBackend
from tests.packet.frames import Packet, at, forwarded, opening, reply, segment
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import serve

HALF_SECOND = 500_000_000  # ns
LATE = 131_000_000_000

Answer = Callable[[str, str], None]


@pytest.fixture(params=["netfilter", "flows"])
def node(node: PacketNode, request: pytest.FixtureRequest) -> PacketNode:
    words = ("detect_local", "netfilter") if request.param == "netfilter" else ("detect_local",)
    node.settings(*words)
    node.put("flow_gate", 0, (0, 0 if request.param == "flows" else 1, 1))
    return node


def is_flows(node: PacketNode) -> bool:
    return bool(node.maps["flow_gate"].get(0).empty != 1)


def asks(node: PacketNode, client: str, where: str, age: int = 0) -> Packet:
    """Send the client's SYN; then set the age of the attempt."""
    asked: Packet = node.ingress(segment(client, where)).packet
    for key, attempt in attempts(node).items():
        node.put("attempts", key, attempt._replace(since=attempt.since - age))
    return asked


def answers(node: PacketNode, client: str, where: str, flags: str, asked: Packet) -> None:
    """Send the backend's reply to the client."""
    if is_flows(node):
        node.egress(reply(forwarded(asked), flags))
    else:
        node.egress(segment(where, client, flags, seq=5000, ack=1001))


def attempts(node: PacketNode) -> dict[object, Any]:
    return dict(node.maps["attempts"].items())


def counted(node: PacketNode, backend: str) -> BackendHealth:
    key = ServiceBackend(1, node.backend_id(1, backend))
    found: BackendHealth | None = node.maps["backend_health"].get(key)
    return found or BackendHealth()


def clients_of(places: Places) -> list[str]:
    return [at(places.client, 50001), at(places.other_client, 50001), at(places.remote_pod, 50001)]


def reached(node: PacketNode, where: str, *clients: str) -> None:
    for client in clients:
        answers(node, client, where, "SA", asks(node, client, where))


def another(client: str) -> str:
    """Return another connection of the client."""
    return client.replace("50001", "50002")


@pytest.mark.parametrize("how", ["unanswered", "refused"])
def test_clients_that_reached_the_service_count(node: PacketNode, places: Places, how: str) -> None:
    """Each client counts once, whatever its ports; a connection that opens clears the failures."""
    backend = at(places.there, 8080)
    where = serve(node, places, "nodeport", cluster=[backend])
    clients = clients_of(places)
    reached(node, where, *clients)
    assert not attempts(node)
    for client in map(another, clients):
        if how == "refused":
            answers(node, client, where, "RA", asks(node, client, where))
        else:
            asks(node, client, where, HALF_SECOND)
            asks(node, client, where, HALF_SECOND)
            asks(node, client, where)
    found = counted(node, backend)
    assert len({found.first, found.second, found.third} - {0}) == 3
    reached(node, where, clients[0].replace("50001", "50003"))
    assert counted(node, backend)[1:] == (0, 0, 0, 1)


def test_a_client_that_never_reached_it_says_nothing(node: PacketNode, places: Places) -> None:
    backend = at(places.there, 8080)
    where = serve(node, places, "nodeport", cluster=[backend])
    for client in clients_of(places):
        asks(node, client, where, HALF_SECOND)
        asks(node, client, where)
    assert counted(node, backend) == BackendHealth()


def test_a_second_syn_at_once_is_no_failure(node: PacketNode, places: Places) -> None:
    """A second SYN at once is no failure, nor is the SYN of a connection that was forgotten, or
    answered in between.
    """
    backend = at(places.there, 8080)
    where = serve(node, places, "nodeport", cluster=[backend])
    client = clients_of(places)[0]
    reached(node, where, client)
    asks(node, another(client), where)
    asks(node, another(client), where, LATE)
    asked = asks(node, another(client), where, HALF_SECOND)
    answers(node, another(client), where, "SA", asked)
    asks(node, another(client), where)
    assert counted(node, backend) == BackendHealth()


def test_a_syn_in_an_open_connection_is_no_failure(node: PacketNode, places: Places) -> None:
    """The backend answers such a SYN with an ACK, not a SYN; another backend may be chosen for the
    SYN.
    """
    backend = at(places.there, 8080)
    where = serve(node, places, "nodeport", cluster=[backend])
    client = clients_of(places)[0]
    reached(node, where, client)
    for _ in range(3):
        asked = asks(node, client, where, HALF_SECOND)
        answers(node, client, where, "A", asked)
    assert counted(node, backend) == BackendHealth()


def test_the_backend_of_the_first_syn_counts(node: PacketNode, places: Places) -> None:
    """Conntrack, or the flow, leads later SYNs to the same backend."""
    first, other = at(places.there, 8080), at(places.here, 8080)
    where = serve(node, places, "nodeport", cluster=[first])
    client = clients_of(places)[0]
    reached(node, where, client)
    asks(node, another(client), where, HALF_SECOND)
    serve(node, places, "nodeport", cluster=[other])
    asks(node, another(client), where)
    assert counted(node, first).first
    assert counted(node, other) == BackendHealth()


def test_an_answer_to_a_later_syn_clears_nothing(node: PacketNode, places: Places) -> None:
    """The flow tables draw again once the backend is set aside, so another backend may have
    answered; from then on the client counts again.
    """
    backend = at(places.there, 8080)
    where = serve(node, places, "nodeport", cluster=[backend])
    (client, other, _) = clients_of(places)
    reached(node, where, client, other)
    asks(node, another(client), where, HALF_SECOND)
    answers(node, another(client), where, "SA", asks(node, another(client), where))
    assert counted(node, backend).first
    asks(node, another(other), where, HALF_SECOND)
    asks(node, another(other), where)
    assert counted(node, backend).second
    assert len(dict(node.maps["service_clients"].items())) == 1


def test_nothing_is_noted_whose_answer_may_not_be_seen(node: PacketNode, places: Places) -> None:
    """While a device may lack the program at egress."""
    flags = node.maps["settings"].get(0).flags
    where = serve(node, places, "nodeport", cluster=[at(places.there, 8080)])
    node.settings(*flags, "netfilter", "attaching")
    for client in clients_of(places):
        node.ingress(opening("tcp", client, where))
    assert not attempts(node)


def test_nothing_is_noted_while_it_is_off(node: PacketNode, places: Places) -> None:
    gate = node.maps["flow_gate"].get(0)
    node.put("flow_gate", 0, gate._replace(endpoint_health=0))
    where = serve(node, places, "nodeport", cluster=[at(places.there, 8080)])
    reached(node, where, *clients_of(places))
    assert not attempts(node)
    assert not dict(node.maps["service_clients"].items())
