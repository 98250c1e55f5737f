# SPDX-License-Identifier: Apache-2.0
"""Maps that change while they are read, and flows with entries that the LRU has evicted."""

from typing import Any

import pytest

from tests.packet.frames import at, destination, ends, opening, reply, segment
from tests.packet.node import PacketNode, spelled
from tests.packet.places import Places
from tests.packet.services import serve


def evict(node: PacketNode, protocol: str, entry: str) -> None:
    """Evict entries like the LRU does."""
    table = node.maps["tcp_flows" if protocol == "tcp" else "other_flows"]
    found = [key for key, _ in table.items() if spelled(key) == entry]
    assert found
    table.delete(found)


@pytest.mark.parametrize("protocol", ["udp", "sctp"])
@pytest.mark.parametrize("sender", ["pod", "client"])
def test_request_evicted(node: PacketNode, places: Places, protocol: str, sender: str) -> None:
    """A UDP flow whose request entry was evicted is opened again, over its other entries."""
    kind = "cluster" if sender == "pod" else "nodeport"
    client = at(getattr(places, sender), 50123)
    where = serve(node, places, kind, protocol, cluster=[at(places.there, 8080)])
    node.through(opening(protocol, client, where))
    evict(node, protocol, f"ingress {client} > {where}")
    came = node.ingress(opening(protocol, client, where))
    assert came.verdicts == {"translated": 1}
    asked = node.through(opening(protocol, client, where))
    assert destination(asked) == at(places.there, 8080)
    assert ends(node.through(reply(asked))) == f"{where} > {client}"


def test_new_connection_over_remains(node: PacketNode, places: Places) -> None:
    """A new connection from the same port replaces the remaining entries of an evicted flow."""
    client = at(places.client, 50123)
    where = serve(node, places, "nodeport", cluster=[at(places.there, 8080)])
    node.through(segment(client, where))
    evict(node, "tcp", f"ingress {client} > {where}")
    asked = node.through(segment(client, where, seq=7))
    assert ends(node.through(reply(asked))) == f"{where} > {client}"


def test_no_settings(node: PacketNode, places: Places, protocol: str) -> None:
    """Before the agent has written the settings, nothing is masqueraded or refused."""
    blank: Any = node.maps["settings"].value.unpack(bytes(node.maps["settings"].spec.value_size))
    node.put("settings", 0, blank)
    where = serve(node, places, "cluster", protocol, cluster=[at(places.there, 8080)])
    came = node.ingress(opening(protocol, at(places.pod, 50123), where))
    assert destination(came.packet) == at(places.there, 8080)
