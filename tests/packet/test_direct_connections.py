# SPDX-License-Identifier: Apache-2.0
"""Direct connections to an endpoint from a client port that also has a connection through a
frontend.
"""

import pytest

from tests.packet.errors import error
from tests.packet.frames import Packet, at, ends, quoted, reply, segment, source
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import serve


@pytest.fixture
def client(places: Places) -> str:
    return at(places.pod, 50123)


@pytest.fixture
def backend(places: Places) -> str:
    return at(places.there, 8080)


@pytest.fixture
def where(node: PacketNode, places: Places, client: str, backend: str) -> str:
    """Return a cluster IP through which the client is connected to the backend."""
    found = serve(node, places, "cluster", cluster=[backend])
    shaken = node.through(segment(client, found), "pods", "uplink")
    node.through(reply(shaken), "uplink", "pods")
    return found


def direct(node: PacketNode, client: str, backend: str, flags: str = "S") -> Packet:
    return node.through(segment(client, backend, flags), "pods", "uplink")


def test_another_port(node: PacketNode, client: str, backend: str, where: str) -> None:
    """A direct connection gets its own port, even if its SYN is repeated, and both connections get
    replies.
    """
    asked = direct(node, client, backend)
    assert source(asked) != client
    assert ends(direct(node, client, backend)) == ends(asked)
    assert ends(node.through(reply(asked), "uplink", "pods")) == f"{backend} > {client}"
    assert ends(direct(node, client, backend, "A")) == ends(asked)
    known = node.through(segment(client, where, "A"), "pods", "uplink")
    assert ends(node.through(reply(known, "A"), "uplink", "pods")) == f"{where} > {client}"


def test_an_error_is_translated_once(
    node: PacketNode, places: Places, client: str, backend: str, where: str
) -> None:
    """An ICMP error about the direct connection is translated at the client's own device, and not
    again at its bridge.
    """
    asked = direct(node, client, backend)
    about = error("too big", places.router, asked)
    assert node.egress(about, "tunnel", "uplink") == ("pass", bytes(about), {"passed": 1})
    left = node.egress(about, "pods", "uplink")
    assert left.verdicts == {"related": 1}
    assert quoted(left.packet) == f"{client} > {backend}"
