# SPDX-License-Identifier: Apache-2.0
"""A packet whose entry was given to another flow is dropped, never sent elsewhere."""

import pytest

from tests.packet.frames import at, ends, opening, reply
from tests.packet.network import routed_from
from tests.packet.node import Outcome, PacketNode
from tests.packet.places import Places
from tests.packet.services import serve


@pytest.fixture
def where(node: PacketNode, places: Places, kind: str, protocol: str) -> str:
    return serve(node, places, kind, protocol, cluster=[at(places.there, 8080)])


def dropped(outcome: Outcome) -> bool:
    return outcome.action == "drop" and outcome.verdicts == {"recycled": 1}


def test_entries_of_others_are_not_believed(
    node: PacketNode, places: Places, client: str, where: str, protocol: str
) -> None:
    """The client's packet is dropped at ingress, the backend's at the hook that knows it."""
    asked = node.through(opening(protocol, client, where))
    node.through(opening(protocol, at(places.client, 50999), where))
    answer = reply(asked)
    assert ends(node.through(answer)) == f"{where} > {client}"
    node.exchange("tcp_flows" if protocol == "tcp" else "other_flows")
    assert dropped(node.ingress(opening(protocol, client, where)))
    came = node.ingress(answer)
    assert dropped(came) or dropped(node.egress(came.packet))


def test_a_reply_is_not_redirected_by_the_entry_of_another(
    node: PacketNode, places: Places, protocol: str
) -> None:
    """With --reply-path=request-device a reply whose entry is another flow's is dropped at egress.

    Nothing is noted in the entries.
    """
    node.settings("detect_local", "reply_to_device")
    backend, where = [at(places.here, 8080)], at(places.node, 30080)
    serve(node, places, "nodeport", protocol, cluster=backend, here=backend)
    for port in (50123, 50124):
        asked = node.through(opening(protocol, at(places.client, port), where), "uplink", "pods")
    node.exchange("tcp_flows" if protocol == "tcp" else "other_flows")
    before = dict(node.maps["tcp_flows" if protocol == "tcp" else "other_flows"].packed_items())
    with routed_from(places.here, "tunnel"):
        came = node.ingress(reply(asked), "pods")
    assert (came.action, came.frame) == ("pass", bytes(reply(asked)))
    assert dropped(node.egress(came.packet, "tunnel", "pods"))
    after = dict(node.maps["tcp_flows" if protocol == "tcp" else "other_flows"].packed_items())
    assert after == before
