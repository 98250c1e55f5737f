# SPDX-License-Identifier: Apache-2.0
"""Ports that this node chooses: for masqueraded flows, and if two flows would have one tuple."""

from itertools import pairwise
from operator import eq

import pytest

from tests.packet.aging import idle
from tests.packet.frames import (
    at,
    chunk,
    destination,
    ends,
    host_of,
    opening,
    port_of,
    reply,
    segment,
    source,
)
from tests.packet.node import FIRST_PORT, LAST_PORT, PacketNode
from tests.packet.places import Places
from tests.packet.services import KINDS, serve, written


def flow(node: PacketNode, protocol: str, client: str, where: str) -> str:
    """Return the source that the backend sees for a client's flow, after testing its answer."""
    asked = node.through(opening(protocol, client, where))
    assert ends(node.through(reply(asked))) == f"{where} > {client}"
    return source(asked)


def opened(node: PacketNode, protocol: str, client: str, where: str) -> str:
    """Return the source that the backend sees for an open flow, in which both sides and then the
    client have sent, for 10 s.
    """
    source_seen = flow(node, protocol, client, where)
    if protocol != "udp":
        more = segment(client, where, "A") if protocol == "tcp" else chunk(client, where, "data")
        node.through(more)
    idle(node, protocol, 0, lasted=10)
    return source_seen


def test_masquerade_ports_are_unique(node: PacketNode, places: Places, protocol: str) -> None:
    """No two flows to a backend have the same masquerade port, whoever opened them."""
    node.settings("detect_local", first_port=40_000, last_port=40_255)
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.there, 8080)])
    clients = [
        at(host, port)
        for host in (places.client, places.other_client)
        for port in range(2001, 2031)
    ]
    seen = [flow(node, protocol, client, where) for client in clients]
    assert len(set(seen)) == len(clients)
    assert all(40_000 <= port_of(place) <= 40_255 for place in seen)
    assert len({port_of(place) for place in seen}) > 30


def drawn(node: PacketNode, protocol: str, clients: list[str], where: str) -> list[int]:
    """Return the masquerade ports of these clients' flows, as if no other flow existed."""
    table = node.maps["tcp_flows" if protocol == "tcp" else "other_flows"]
    table.delete([packet for packet, _ in table.items()])
    return [port_of(flow(node, protocol, client, where)) for client in clients]


def test_masquerade_ports_are_random(node: PacketNode, places: Places, protocol: str) -> None:
    """Masquerade ports are drawn from the whole range, independent of the client's port."""
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.there, 8080)])
    clients = [at(places.client, port) for port in range(2001, 2041)]
    first, second = (drawn(node, protocol, clients, where) for _ in range(2))
    assert max(first) - min(first) > (LAST_PORT - FIRST_PORT) / 2
    assert len({after - before for before, after in pairwise(first)}) > 30
    assert sum(map(eq, first, second)) < 5


def test_a_new_flow_is_dropped_if_no_port_is_free(
    node: PacketNode, places: Places, protocol: str
) -> None:
    """If open flows have all ports, a new flow is dropped with a verdict; older flows continue."""
    node.settings("detect_local", first_port=40_000, last_port=40_000)
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.there, 8080)])
    first, second = at(places.client, 2001), at(places.client, 2002)
    opened(node, protocol, first, where)
    came = node.ingress(opening(protocol, second, where))
    left = node.egress(came.packet)
    assert (left.action, left.verdicts) == ("drop", {"ports_exhausted": 1})
    assert flow(node, protocol, first, where) == at(places.node, 40_000)


def test_backends_apart(node: PacketNode, places: Places, protocol: str) -> None:
    """The same port can be used for another backend or another device."""
    node.settings("detect_local", first_port=40_000, last_port=40_000)
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.there, 8080)])
    other = serve(
        node, places, "external", protocol, service=2, cluster=[at(places.elsewhere, 8080)]
    )
    assert flow(node, protocol, at(places.client, 2001), where) == at(places.node, 40_000)
    assert flow(node, protocol, at(places.client, 2001), other) == at(places.node, 40_000)


@pytest.mark.parametrize("ending", ["closed", "aborted"])
def test_room_after(node: PacketNode, places: Places, ending: str) -> None:
    """The port of a connection that both sides have ended is free for every client."""
    node.settings("detect_local", first_port=40_000, last_port=40_000)
    where = serve(node, places, "nodeport", cluster=[at(places.there, 8080)])
    client = at(places.client, 2001)
    asked = node.through(opening("tcp", client, where))
    if ending == "closed":
        node.through(segment(client, where, "FA"))
        node.through(reply(asked, "FA"))
    else:
        node.through(segment(client, where, "R"))
    assert flow(node, "tcp", at(places.other_client, 2002), where) == at(places.node, 40_000)


def test_port_passed_on(node: PacketNode, places: Places) -> None:
    """A flow does not delete the entry of another flow that now has its masquerade port."""
    node.settings("detect_local", first_port=40_000, last_port=40_000)
    where = serve(node, places, "nodeport", cluster=[at(places.there, 8080)])
    client, other = at(places.client, 2001), at(places.other_client, 2002)
    node.through(opening("tcp", client, where))
    node.through(segment(client, where, "R"))
    opened(node, "tcp", other, where)
    again = node.ingress(opening("tcp", client, where))
    assert node.egress(again.packet).verdicts == {"ports_exhausted": 1}
    answer = node.through(segment(at(places.there, 8080), at(places.node, 40_000), "A"))
    assert ends(answer) == f"{where} > {other}"


def test_no_room_yet(node: PacketNode, places: Places) -> None:
    """A flow that only its client has ended keeps its port: the backend may be sending."""
    node.settings("detect_local", first_port=40_000, last_port=40_000)
    where = serve(node, places, "nodeport", cluster=[at(places.there, 8080)])
    client = at(places.client, 2001)
    asked = node.through(opening("tcp", client, where))
    node.through(reply(asked))
    node.through(segment(client, where, "FA"))
    came = node.ingress(opening("tcp", at(places.other_client, 2002), where))
    assert node.egress(came.packet).verdicts == {"ports_exhausted": 1}
    assert ends(node.through(reply(asked, "A"))) == f"{where} > {client}"


@pytest.fixture
def twins(node: PacketNode, places: Places, protocol: str) -> list[str]:
    """Publish four frontends of one service, whose only backend is on this node and sees its
    clients.
    """
    backend = at(places.here, 8080)
    frontends = {written(places, kind, protocol): KINDS[kind] for kind in KINDS}
    node.settings("guard_nodeports", first_port=40_000, last_port=44_999)
    node.publish(1, frontends, cluster=[backend], here=[backend])
    ports = {"cluster": 80, "nodeport": 30080, "balancer": 443, "external": 8443}
    hosts = {"cluster": "cluster_ip", "nodeport": "node"}
    return [at(getattr(places, hosts.get(kind, kind)), ports[kind]) for kind in KINDS]


def test_two_flows_with_one_tuple_get_their_own_answers(
    node: PacketNode, places: Places, protocol: str, twins: list[str]
) -> None:
    """Two flows from one client port to one backend through two frontends get the right answers."""
    client = at(places.client, 50123)
    asked = [node.ingress(opening(protocol, client, where)) for where in twins]
    assert [came.verdicts for came in asked] == [{"translated": 1}] + [{"port_changed": 1}] * 3
    assert source(asked[0].packet) == client
    assert len({source(came.packet) for came in asked}) == 4
    assert {host_of(source(came.packet)) for came in asked} == {places.client}
    assert {destination(came.packet) for came in asked} == {at(places.here, 8080)}
    for where, came in [*zip(twins, asked, strict=True)] * 2:
        answer = node.through(reply(came.packet), "pods", "uplink")
        assert ends(answer) == f"{where} > {client}"
        again = node.through(opening(protocol, client, where), "uplink", "pods")
        assert ends(again) == ends(came.packet)


@pytest.mark.parametrize("closed", ["backend", "both"])
def test_alike_closed(node: PacketNode, places: Places, closed: str) -> None:
    """A flow that only the backend has closed keeps its client's port; a fully closed flow does
    not.
    """
    backend, client = at(places.here, 8080), at(places.client, 50123)
    kinds = ("cluster", "external")
    node.settings("guard_nodeports", first_port=40_000, last_port=44_999)
    node.publish(
        1, {written(places, k): KINDS[k] for k in kinds}, cluster=[backend], here=[backend]
    )
    where, other = at(places.cluster_ip, 80), at(places.external, 8443)
    asked = node.ingress(segment(client, where)).packet
    for flags in ("SA", "FA"):
        node.through(reply(asked, flags), "pods", "uplink")
    if closed == "both":
        node.through(segment(client, where, "FA"), "uplink", "pods")
    came = node.ingress(segment(client, other))
    assert came.verdicts == {"translated" if closed == "both" else "port_changed": 1}
    if closed == "backend":
        more = node.through(segment(client, where, "PA", payload=b"more"), "uplink", "pods")
        assert ends(more) == ends(asked)


def test_alike_without_port(
    node: PacketNode, places: Places, protocol: str, twins: list[str]
) -> None:
    """If the client can get no other port, the newer flow is dropped with a verdict."""
    node.settings("guard_nodeports", first_port=40_000, last_port=40_000)
    client = at(places.client, 50123)
    came = [node.ingress(opening(protocol, client, where)) for where in twins[:2]]
    assert came[1].verdicts == {"port_changed": 1}
    node.through(reply(came[1].packet), "pods", "uplink")
    if protocol != "udp":
        node.through(
            segment(client, twins[1], "A")
            if protocol == "tcp"
            else chunk(client, twins[1], "data"),
            "uplink",
            "pods",
        )
    idle(node, protocol, 0, lasted=10)
    came.append(node.ingress(opening(protocol, client, twins[2])))
    assert (came[2].action, came[2].verdicts) == ("drop", {"ports_exhausted": 1})
    answer = node.through(reply(came[1].packet), "pods", "uplink")
    assert ends(answer) == f"{twins[1]} > {client}"
