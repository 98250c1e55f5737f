# SPDX-License-Identifier: Apache-2.0
"""A UDP flow goes to the service that currently has its frontend (kube-proxy.md 11.1)."""

from typing import Any

import pytest

from tests.packet.frames import at, datagram, destination, ends, opening, reply, segment
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import KINDS, moves, serve, written


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def client(places: Places) -> str:
    return at(places.client, 50123)


@pytest.fixture
def where(node: PacketNode, places: Places, kind: str, client: str) -> str:
    """Return a frontend of service 1, to which the client has an answered UDP flow."""
    node.settings("detect_local", frontend_moves=1)
    where = serve(node, places, kind, "udp", cluster=[at(places.there, 8080)])
    node.through(reply(node.through(opening("udp", client, where))))
    assert node.ingress(datagram(client, where)).verdicts == {"established": 1}
    return where


def test_a_flow_moves_with_its_frontend(
    node: PacketNode, places: Places, kind: str, where: str, client: str
) -> None:
    """The next datagram opens a flow to the new service; replies come from the frontend."""
    node.publish(1, {f"{at(places.any, 7)}/udp": "external"}, cluster=[at(places.there, 8080)])
    other: dict[str, Any] = {"service": 2, "cluster": [at(places.elsewhere, 53)]}
    serve(node, places, kind, "udp", **other)
    moves(node)
    came = node.ingress(datagram(client, where))
    assert came.verdicts == {"translated": 1}
    assert destination(came.packet) == at(places.elsewhere, 53)
    left = node.egress(came.packet)
    answer = node.ingress(reply(left.packet))
    assert ends(node.egress(answer.packet).packet) == f"{where} > {client}"
    assert node.ingress(datagram(client, where)).verdicts == {"established": 1}


def test_others_moved(node: PacketNode, where: str, client: str) -> None:
    """If other frontends have moved, the flow is looked up once, and continues."""
    (request,) = (f for f in node.flows("udp").values() if "request" in f.flags and f.kind == 1)
    assert request.frontend_moves == 1
    moves(node)
    assert node.ingress(datagram(client, where)).verdicts == {"established": 1}
    (request,) = (f for f in node.flows("udp").values() if "request" in f.flags and f.kind == 1)
    assert request.frontend_moves == 2


def test_given_up(node: PacketNode, places: Places, kind: str, where: str, client: str) -> None:
    """The flows of a frontend without any service stay, until another service gets the frontend."""
    node.withdraw(written(places, kind, "udp"))
    for _ in range(2):
        assert node.ingress(datagram(client, where)).verdicts == {"established": 1}
        moves(node)
    serve(node, places, kind, "udp", service=2, cluster=[at(places.elsewhere, 53)])
    moves(node)
    assert destination(node.ingress(datagram(client, where)).packet) == at(places.elsewhere, 53)


def test_opened_meanwhile(node: PacketNode, places: Places, kind: str, client: str) -> None:
    """A flow that the former service opened during the agent's write is noticed."""
    node.settings("detect_local", frontend_moves=1)
    where = serve(node, places, kind, "udp", cluster=[at(places.there, 8080)])
    node.through(opening("udp", client, where))
    serve(node, places, kind, "udp", service=2, cluster=[at(places.elsewhere, 53)])
    assert destination(node.ingress(datagram(client, where)).packet) == at(places.elsewhere, 53)


def test_connections_stay(node: PacketNode, places: Places, kind: str, client: str) -> None:
    """TCP connections keep their backend, as in conntrack."""
    node.settings("detect_local", frontend_moves=1)
    where = serve(node, places, kind, cluster=[at(places.there, 8080)])
    node.through(reply(node.through(opening("tcp", client, where))))
    serve(node, places, kind, service=2, cluster=[at(places.elsewhere, 53)])
    moves(node)
    came = node.ingress(segment(client, where, "PA", payload=b"more"))
    assert destination(came.packet) == at(places.there, 8080)
