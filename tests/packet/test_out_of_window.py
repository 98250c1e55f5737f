# SPDX-License-Identifier: Apache-2.0
"""Packets that conntrack would call INVALID (kube-proxy.md 11.2, 12 row 8).

kube-proxy's translation depends on conntrack: packets out of the window used to reach the client
untranslated, and the client reset its connection. Here a flow's window only decides whether it has
ended (test_windows.py).
"""

import pytest

from tests.packet.frames import at, destination, ends, opening, segment, source
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import KINDS, serve

SEQUENCES = [0, 5000, 5001 + (1 << 20), 1 << 31, 0xFFFFFFFF]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seq", SEQUENCES)
def test_answer_out_of_window(node: PacketNode, places: Places, kind: str, seq: int) -> None:
    """An answer with any sequence number comes from the frontend, or not at all."""
    client = at(places.client, 50123)
    where = serve(node, places, kind, cluster=[at(places.there, 8080)])
    asked = node.through(opening("tcp", client, where))
    for flags in ("A", "PA", "FA", "R", "RA"):
        injected = segment(destination(asked), source(asked), flags, seq=seq, payload=b"forged")
        assert ends(node.through(injected)) == f"{where} > {client}"


@pytest.mark.parametrize("seq", SEQUENCES)
def test_question_out_of_window(node: PacketNode, places: Places, seq: int) -> None:
    """A client's segment with any sequence number reaches its backend, or no one."""
    client = at(places.client, 50123)
    where = serve(node, places, "nodeport", cluster=[at(places.there, 8080)])
    node.through(opening("tcp", client, where))
    came = node.through(segment(client, where, "PA", seq=seq, payload=b"odd"))
    assert destination(came) == at(places.there, 8080)
