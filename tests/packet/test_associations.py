# SPDX-License-Identifier: Apache-2.0
"""SCTP associations behave like TCP connections: they are opened by INIT, and kept until one side
ends them.
"""

from typing import Any

import pytest

from tests.packet.frames import CHUNKS, Packet, at, chunk, destination, ends, source
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import serve


@pytest.fixture
def where(node: PacketNode, places: Places, kind: str) -> str:
    return serve(node, places, kind, "sctp", cluster=[at(places.there, 8080)])


def answer(node: PacketNode, asked: Packet, word: str) -> str:
    """Return the source of the answer that a client gets."""
    return ends(node.through(chunk(destination(asked), source(asked), word)))


def replace(node: PacketNode, places: Places, kind: str) -> None:
    """Let another backend take new associations; the old backend keeps its existing ones."""
    there, elsewhere = at(places.there, 8080), at(places.elsewhere, 8080)
    serve(node, places, kind, "sctp", cluster=[elsewhere], leaving=[there])


def test_an_association_keeps_its_backend(
    node: PacketNode, places: Places, client: str, kind: str, where: str
) -> None:
    """An association keeps its backend, even a removed one, and so does a repeated INIT."""
    asked = node.through(chunk(client, where))
    assert answer(node, asked, "init ack") == f"{where} > {client}"
    replace(node, places, kind)
    assert ends(node.through(chunk(client, where))) == ends(asked)
    serve(node, places, kind, "sctp", cluster=[at(places.elsewhere, 8080)])
    for word in ("data", "heartbeat", "shutdown"):
        assert ends(node.through(chunk(client, where, word))) == ends(asked)
        assert answer(node, asked, word) == f"{where} > {client}"


@pytest.mark.parametrize("last", ["shutdown complete", "abort"])
@pytest.mark.parametrize("side", ["client", "backend"])
def test_chosen_anew(
    node: PacketNode, places: Places, client: str, kind: str, where: str, last: str, side: str
) -> None:
    """After its end the same client port opens a new association, to a current endpoint."""
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
def test_packets_of_no_association_pass(
    node: PacketNode, client: str, where: str, word: str
) -> None:
    """A packet that opens no association and belongs to none passes: conntrack may know it."""
    packet = chunk(client, where, word)
    assert node.ingress(packet) == ("pass", bytes(packet), {"passed": 1})
    assert not node.flows("sctp")


def established(node: PacketNode, client: str, where: str) -> Packet:
    """Return the last packet of the client, as the backend gets it."""
    asked = node.through(chunk(client, where))
    assert answer(node, asked, "init ack") == f"{where} > {client}"
    return node.through(chunk(client, where, "cookie echo"))


def ended(node: PacketNode) -> set[str]:
    """Return how the entries of all flows have ended."""
    return {word for flow in node.flows("sctp").values() for word in flow.flags & {"fin", "rst"}}


def sent_by(side: str, client: str, where: str, asked: Packet) -> tuple[str, str]:
    """Return source and destination of one side's packets, as this node receives them."""
    return (client, where) if side == "client" else (destination(asked), source(asked))


ENDS = pytest.mark.parametrize("last", ["shutdown", "shutdown complete", "abort"])
SIDES = pytest.mark.parametrize("side", ["client", "backend"])


@ENDS
@SIDES
def test_forged_end(node: PacketNode, client: str, where: str, last: str, side: str) -> None:
    """A sender without the receiver's tag cannot end an association; its packet is translated."""
    asked = established(node, client, where)
    sender = sent_by(side, client, where, asked)
    own = 7 if side == "client" else 8
    for tag in (0, own, 99):
        node.through(chunk(*sender, last, tag))
    assert ended(node) == set()
    node.through(chunk(*sender, last))
    assert ended(node) == {"fin" if last == "shutdown" else "rst"}


@SIDES
@pytest.mark.parametrize("last", ["shutdown complete", "abort"])
def test_reflected_tag(node: PacketNode, client: str, where: str, last: str, side: str) -> None:
    """A side that has forgotten the association sends back the tag that it got (flag T)."""
    asked = established(node, client, where)
    sender = sent_by(side, client, where, asked)
    own, its = (7, 8) if side == "client" else (8, 7)
    flag: dict[str, Any] = {"TCB": 1}
    node.through(chunk(*sender, last, its, **flag))
    assert ended(node) == set()
    node.through(chunk(*sender, last, own, **flag))
    assert ended(node) == {"rst"}


def test_a_refusal_aborts_with_the_clients_tag(node: PacketNode, client: str, where: str) -> None:
    """A backend that refuses an association aborts it with the client's tag."""
    asked = node.through(chunk(client, where))
    node.through(chunk(destination(asked), source(asked), "abort"))
    assert ended(node) == {"rst"}


def test_forged_opening(node: PacketNode, client: str, where: str) -> None:
    """An INIT in the client's name brings no tag into an association, nor does its INIT ACK."""
    asked = established(node, client, where)
    node.through(chunk(client, where, init_tag=77))
    node.through(chunk(destination(asked), source(asked), "init ack", 77, init_tag=88))
    for sender, tag in (((client, where), 88), ((destination(asked), source(asked)), 77)):
        node.through(chunk(*sender, "abort", tag))
    assert ended(node) == set()
    node.through(chunk(client, where, "abort"))
    assert ended(node) == {"rst"}


def test_a_restarted_client_meets_its_backend(node: PacketNode, client: str, where: str) -> None:
    """Packets of a client that has restarted (RFC 9260 5.2.2) go to its backend, which answers;
    their new tags are not stored, so the flow stays until its timeout.
    """
    asked = established(node, client, where)
    node.through(chunk(client, where, init_tag=77))
    node.through(chunk(destination(asked), source(asked), "init ack", 77, init_tag=88))
    assert ends(node.through(chunk(client, where, "cookie echo", 88))) == ends(asked)
    assert answer(node, asked, "data") == f"{where} > {client}"
    node.through(chunk(client, where, "abort", 88))
    assert ended(node) == set()


def test_shutdown_of_one_side(
    node: PacketNode, places: Places, client: str, kind: str, where: str
) -> None:
    """An INIT while the association shuts down may be forged: it goes to the same backend."""
    asked = established(node, client, where)
    node.through(chunk(client, where, "shutdown"))
    replace(node, places, kind)
    assert ends(node.through(chunk(client, where))) == ends(asked)


def test_handshake_with_a_wrong_tag(node: PacketNode, client: str, where: str) -> None:
    """A client that does not know the backend's tag has not completed the handshake."""
    answer(node, node.through(chunk(client, where)), "init ack")
    for tag in (0, 7, 99):
        node.through(chunk(client, where, "cookie echo", tag))
    assert "seen" not in node.flows("sctp")[f"ingress {client} > {where}"].flags
    node.through(chunk(client, where, "cookie echo"))
    assert "seen" in node.flows("sctp")[f"ingress {client} > {where}"].flags
