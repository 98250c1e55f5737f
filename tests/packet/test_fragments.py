# SPDX-License-Identifier: Apache-2.0
"""Fragmented datagrams: only the first fragment has ports, and the other fragments follow it."""

import pytest
from scapy.layers.inet import defragment
from scapy.layers.inet6 import IPv6ExtHdrFragment, defragment6

from ebpflb.entries.services import NO_PREFIX
from tests.packet import wire
from tests.packet.frames import (
    IP,
    TEXT,
    UDP,
    IPv6,
    Packet,
    Raw,
    at,
    built,
    carrier,
    destination,
    ends,
    fragments,
    host_of,
    network,
    port_of,
    source,
)
from tests.packet.node import PacketNode
from tests.packet.places import IPV6, Places
from tests.packet.services import serve


def joined(pieces: list[Packet]) -> Packet:
    """Return the datagram as its receiver reassembles it; its checksum is correct."""
    if IP in pieces[0]:
        (whole,) = defragment([piece[IP] for piece in pieces])
    else:
        whole = defragment6([piece[IPv6] for piece in pieces])
    frame = type(pieces[0])(src=pieces[0].src, dst=pieces[0].dst) / whole
    if IP in whole:
        del frame[IP].chksum
    frame = built(frame)
    assert not wire.faults(bytes(frame))
    assert bytes(frame[UDP].payload) == TEXT
    return frame


def untouched(node: PacketNode, packet: Packet) -> bool:
    return node.ingress(packet)[:2] == ("pass", bytes(packet))


@pytest.fixture(params=["pod", "client"])
def client(request: pytest.FixtureRequest, places: Places) -> str:
    return at(getattr(places, request.param), 50123)


@pytest.fixture
def where(node: PacketNode, places: Places, client: str) -> str:
    kind = "cluster" if client == at(places.pod, 50123) else "nodeport"
    return serve(node, places, kind, "udp", cluster=[at(places.there, 5353)])


def test_both_ways(node: PacketNode, places: Places, client: str, where: str) -> None:
    """A fragmented request arrives complete, and so does the answer."""
    asked = joined([node.through(piece) for piece in fragments(client, where)])
    assert destination(asked) == at(places.there, 5353)
    answer = fragments(destination(asked), source(asked))
    assert ends(joined([node.through(piece) for piece in answer])) == f"{where} > {client}"
    again = joined([node.through(piece) for piece in fragments(client, where, 8)])
    assert ends(again) == ends(asked)


def test_fragments_after_the_first_follow_it(node: PacketNode, client: str, where: str) -> None:
    """Fragments before the first one are left alone; fragments after it follow it."""
    first, second, third = fragments(client, where)
    assert untouched(node, third)
    node.through(first)
    assert not untouched(node, second)
    assert not untouched(node, third)


def test_repeated_fragments_are_translated_again(node: PacketNode, client: str, where: str) -> None:
    pieces = fragments(client, where)
    once = [ends(node.through(pieces[0]))] + [bytes(node.through(p)) for p in pieces[1:]]
    again = [ends(node.through(pieces[0]))] + [bytes(node.through(p)) for p in pieces[1:]]
    assert once == again


def test_id_again(node: PacketNode, places: Places, client: str, where: str) -> None:
    """IP ids are reused: an earlier datagram's entry does not translate a later datagram's
    fragments.
    """
    for piece in fragments(client, where):
        node.through(piece)
    assert port_of(where) != 9999 and places
    node.settings("detect_local", **dict.fromkeys(("span_v4", "span_v6"), NO_PREFIX))
    for piece in fragments(client, at(host_of(where), 9999)):
        assert untouched(node, piece)


def test_id_of_another(node: PacketNode, places: Places, client: str, where: str) -> None:
    """Another client's fragments with the same id wait for that client's first fragment."""
    node.through(fragments(client, where)[0])
    other = fragments(at(places.remote_pod, 50123), where)
    assert untouched(node, other[1])
    node.ingress(other[0])
    assert not untouched(node, other[1])


def test_a_late_fragment_is_left_alone(node: PacketNode, client: str, where: str) -> None:
    """A fragment that comes later than the reassembly timeout is left alone."""
    first, second, _ = fragments(client, where)
    node.through(first)
    table = node.maps["fragments"]
    known = [(key, (1, *ports[1:])) for key, ports in table.items()]
    assert known
    table.write(known)
    assert untouched(node, second)


def test_foreign_fragments_pass(node: PacketNode, places: Places, client: str, where: str) -> None:
    """Fragments of foreign packets pass, and leave no entry."""
    for piece in fragments(client, at(places.elsewhere, port_of(where))):
        assert untouched(node, piece)
        assert node.egress(piece)[:2] == ("pass", bytes(piece))
    assert not list(node.maps["fragments"].items())


def test_first_decides(node: PacketNode, client: str, where: str) -> None:
    """Only first fragments open flows."""
    for piece in fragments(client, where)[1:]:
        assert untouched(node, piece)
    assert not node.flows("udp")


def test_fragments_follow_an_untranslated_first_one(
    node: PacketNode, places: Places, client: str, where: str
) -> None:
    """If a datagram's first fragment is not translated, its other fragments are not either."""
    kind = "cluster" if host_of(where) == places.cluster_ip else "nodeport"
    serve(node, places, kind, "udp")
    first, *others = fragments(client, where)
    came = node.ingress(first)
    assert came.action in ("redirect", "drop")
    assert came.verdicts["refused"] == 1
    for piece in others:
        came = node.ingress(piece)
        assert came.action == "drop" or came.frame == bytes(piece)


@IPV6
def test_an_atomic_fragment_is_a_whole_datagram(
    node: PacketNode, places: Places, client: str, where: str
) -> None:
    """A fragment header around a whole datagram (RFC 6946) changes nothing."""
    header = IPv6ExtHdrFragment(id=7)
    ports = UDP(sport=port_of(client), dport=port_of(where))
    whole = built(carrier(host_of(client), host_of(where)) / header / ports / Raw(TEXT))
    came = node.ingress(whole)
    assert destination(came.packet) == at(places.there, 5353)
    assert not wire.faults(came.frame)
    assert network(whole).nh == 44
