# SPDX-License-Identifier: Apache-2.0
"""A FIN or RST counts only if its numbers are in the window, as in conntrack."""

import pytest

from tests.packet.frames import TCP, Packet, at, ends, reply, segment
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import serve, shake

NEAR = 4_194_304  # bytes; bpf/engine/flows/window.h


@pytest.fixture
def where(node: PacketNode, places: Places, kind: str) -> str:
    return serve(node, places, kind, cluster=[at(places.there, 8080)])


def ended(node: PacketNode) -> set[str]:
    """Return how the entries of all flows have ended."""
    return {word for flow in node.flows().values() for word in flow.flags & {"fin", "rst"}}


FORGED = [
    ("R", {"seq": 1001 + (1 << 31)}),
    ("R", {"seq": 1002}),  # in the window, but its receiver would challenge it
    ("R", {"seq": 1000}),
    ("RA", {"seq": 0}),
    ("FA", {"seq": 1001 + NEAR}),
    ("FA", {"seq": (1001 - NEAR - 1) % 2**32}),
    ("FA", {"seq": 1002, "ack": 5001 + 1}),  # acknowledges what was not sent
    ("FA", {"seq": 1002, "ack": (5001 - NEAR) % 2**32}),
    ("F", {"seq": 1002}),
]


@pytest.mark.parametrize(("flags", "numbers"), FORGED)
def test_forged_by_client(
    node: PacketNode, client: str, where: str, flags: str, numbers: dict[str, int]
) -> None:
    """A sender who does not know the connection's numbers cannot end it; its packet is
    translated.
    """
    got = ends(shake(node, client, where))
    assert ends(node.through(segment(client, where, flags, **numbers))) == got
    assert ended(node) == set()


def summed(packet: Packet) -> Packet:
    """Return the packet with a new checksum, after a change."""
    del packet[TCP].chksum
    return type(packet)(bytes(packet))


def test_a_reset_has_no_number_of_its_own(node: PacketNode, client: str, where: str) -> None:
    """A backend that refuses a connection resets it, without a number of its own."""
    refusal = reply(node.through(segment(client, where)), "RA")
    refusal[TCP].seq = 0
    node.through(summed(refusal))
    assert ended(node) == {"rst"}


def test_forged_reset_of_what_nobody_has_answered(
    node: PacketNode, client: str, where: str
) -> None:
    """If the backend has acknowledged nothing, only a reset with the number after the SYN ends the
    flow.
    """
    node.through(segment(client, where))
    node.through(segment(client, where, "R", seq=1000))
    assert ended(node) == set()
    node.through(segment(client, where, "R", seq=1001))
    assert ended(node) == {"rst"}


def test_end_of_what_nobody_has_answered(node: PacketNode, client: str, where: str) -> None:
    """Neither side's FIN ends or opens a connection that the backend has not accepted."""
    asked = node.through(segment(client, where))
    node.through(segment(client, where, "FA"))
    node.through(reply(asked, "FA"))
    assert not {word for flow in node.flows().values() for word in flow.flags & {"fin", "seen"}}
    node.through(reply(asked))
    node.through(segment(client, where, "FA"))
    assert ended(node) == {"fin"}


def test_another_attempt(node: PacketNode, client: str, where: str) -> None:
    """If a client tries again with other numbers before an answer, the new numbers count."""
    node.through(reply(node.through(segment(client, where, seq=77_000))))
    asked = node.through(segment(client, where, seq=990_000_000))
    answer = reply(asked)
    answer[TCP].seq = 880_000_000
    node.through(summed(answer))
    node.through(segment(client, where, "A", seq=990_000_001, ack=880_000_001))
    request = node.flows()[f"ingress {client} > {where}"]
    assert "seen" in request.flags
    node.through(segment(client, where, "FA", seq=990_000_001, ack=880_000_001))
    assert ended(node) == {"fin"}


@pytest.mark.parametrize("ack", [5002, 5001 + (1 << 31), (5001 - 70_000) % 2**32])
def test_forged_handshake(node: PacketNode, client: str, where: str, ack: int) -> None:
    """A client without the backend's number has not completed the handshake."""
    node.through(reply(node.through(segment(client, where))))
    node.through(segment(client, where, "A", ack=ack))
    assert "seen" not in node.flows()[f"ingress {client} > {where}"].flags
    node.through(segment(client, where, "A"))
    assert "seen" in node.flows()[f"ingress {client} > {where}"].flags


@pytest.mark.parametrize("flags", ["R", "FA"])
def test_numbers_are_not_known(node: PacketNode, client: str, where: str, flags: str) -> None:
    """If a flow's numbers are unknown, every FIN and reset counts."""
    shake(node, client, where)
    table = node.maps["tcp_flows"]
    for key, flow in table.items():
        table.write([(key, flow._replace(end=0, acknowledged=0, asked=0))])
    node.through(segment(client, where, flags, seq=77_777, ack=88_888))
    assert ended(node) == {"rst" if flags == "R" else "fin"}


def later(node: PacketNode, client: str, where: str, flags: str) -> Packet:
    """Return the answer to the next SYN from its port by a backend that has forgotten the
    connection.
    """
    asked = shake(node, client, where)
    node.through(segment(client, where, "S", seq=700_000_000))
    answer = reply(asked, flags)
    answer[TCP].seq, answer[TCP].ack = 0 if "R" in flags else 900_000_000, 700_000_001
    return summed(answer)


def test_later_connection_is_refused(node: PacketNode, client: str, where: str) -> None:
    """The reset that answers the later SYN counts."""
    node.through(later(node, client, where, "RA"))
    assert ended(node) == {"rst"}


def test_later_connection_is_accepted(node: PacketNode, client: str, where: str) -> None:
    """The numbers of the later connection replace those of the forgotten one."""
    node.through(later(node, client, where, "SA"))
    node.through(segment(client, where, "A", seq=700_000_001, ack=900_000_001))
    node.through(segment(client, where, "R", seq=1001))
    assert ended(node) == set()
    node.through(segment(client, where, "FA", seq=700_000_001, ack=900_000_001))
    assert ended(node) == {"fin"}


@pytest.mark.parametrize("flags", ["", "P", "F"])
def test_handshake_without_acknowledgment(
    node: PacketNode, client: str, where: str, flags: str
) -> None:
    """A segment that acknowledges nothing does not complete the handshake."""
    node.through(reply(node.through(segment(client, where))))
    node.through(segment(client, where, flags))
    assert "seen" not in node.flows()[f"ingress {client} > {where}"].flags
