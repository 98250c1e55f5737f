# SPDX-License-Identifier: Apache-2.0
"""SCTP associations, as TCP connections: opened by INIT, kept until one side ends them."""

import pytest

from tests.packet.frames import CHUNKS, Packet, at, chunk, destination, ends, source
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import serve


@pytest.fixture
def where(node: PacketNode, places: Places, kind: str) -> str:
    return serve(node, places, kind, "sctp", cluster=[at(places.there, 8080)])


def answer(node: PacketNode, asked: Packet, word: str) -> str:
    """The source of the answer that a client gets."""
    return ends(node.through(chunk(destination(asked), source(asked), word)))


def replace(node: PacketNode, places: Places, kind: str) -> None:
    """Another backend takes the new associations; the old one serves those that it has."""
    there, elsewhere = at(places.there, 8080), at(places.elsewhere, 8080)
    serve(node, places, kind, "sctp", cluster=[elsewhere], leaving=[there])


def test_kept(node: PacketNode, places: Places, client: str, kind: str, where: str) -> None:
    """It keeps its backend, also when that is gone, and so does an INIT that is sent again."""
    asked = node.through(chunk(client, where))
    assert answer(node, asked, "init ack") == f"{where} > {client}"
    replace(node, places, kind)
    assert ends(node.through(chunk(client, where))) == ends(asked)
    serve(node, places, kind, "sctp", cluster=[at(places.elsewhere, 8080)])
    for word in ("data", "heartbeat", "shutdown"):
        assert ends(node.through(chunk(client, where, word))) == ends(asked)
        assert answer(node, asked, word) == f"{where} > {client}"


@pytest.mark.parametrize("last", ["shutdown", "shutdown complete", "abort"])
@pytest.mark.parametrize("side", ["client", "backend"])
def test_chosen_anew(
    node: PacketNode, places: Places, client: str, kind: str, where: str, last: str, side: str
) -> None:
    """After its end the same client port opens a new one, to who serves now."""
    asked = node.through(chunk(client, where))
    if side == "client":
        assert ends(node.through(chunk(client, where, last))) == ends(asked)
    else:
        assert answer(node, asked, last) == f"{where} > {client}"
    replace(node, places, kind)
    asked = node.through(chunk(client, where))
    assert destination(asked) == at(places.elsewhere, 8080)
    assert answer(node, asked, "init ack") == f"{where} > {client}"


@pytest.mark.parametrize("word", [word for word in CHUNKS if word != "init"])
def test_foreign(node: PacketNode, client: str, where: str, word: str) -> None:
    """What opens no association and belongs to none is left alone: conntrack may know it."""
    packet = chunk(client, where, word)
    assert node.ingress(packet) == ("pass", bytes(packet), {"passed": 1})
    assert not node.flows("sctp")
