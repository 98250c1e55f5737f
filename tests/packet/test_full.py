# SPDX-License-Identifier: Apache-2.0
"""Flows without room. An LRU map always makes room, so these maps are plain hashes."""

from collections.abc import Iterator

import pytest

from ebpflb.kernel.maps import layout
from ebpflb.kernel.programs.compiler import Compiled
from tests.packet.conftest import Loaded, loaded
from tests.packet.frames import at, ends, opening, reply
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import serve


@pytest.fixture(scope="module")
def datapath(compiled: Compiled) -> Iterator[Loaded]:
    """Load maps with room for the two entries of one flow."""
    names = ("tcp_flows", "other_flows")
    tight = {name: layout.MAPS[name]._replace(kind="HASH", entries=2) for name in names}
    with loaded(compiled, **tight) as found:
        yield found


def test_a_connection_is_dropped(node: PacketNode, places: Places) -> None:
    """A connection without room for its flow is dropped."""
    where = serve(node, places, "cluster", cluster=[at(places.there, 8080)])
    first, second = at(places.pod, 1), at(places.pod, 2)
    asked = node.through(opening("tcp", first, where), "pods", "uplink")
    refused = node.ingress(opening("tcp", second, where), "pods")
    assert refused.action == "drop"
    assert refused.verdicts == {"flows_full": 1}
    assert node.flow_counters()[2] > 0
    assert ends(node.through(reply(asked), "uplink", "pods")) == f"{where} > {first}"


def test_a_drop_says_nothing_about_the_backend(node: PacketNode, places: Places) -> None:
    """A dropped connection says nothing about its backend (path/attempt.h)."""
    where = serve(node, places, "cluster", cluster=[at(places.there, 8080)])
    gate = node.maps["flow_gate"].get(0)
    node.put("flow_gate", 0, gate._replace(endpoint_health=1))
    for port in (1, 2):
        node.ingress(opening("tcp", at(places.pod, port), where), "pods")
    assert [key.source_port for key, _ in node.maps["attempts"].items()] == [1]


@pytest.mark.parametrize("protocol", ["udp", "sctp"])
def test_a_datagram_is_sent_without_state(node: PacketNode, places: Places, protocol: str) -> None:
    """A datagram is sent without state; its reply is not translated."""
    where = serve(node, places, "cluster", protocol, cluster=[at(places.there, 5353)])
    node.ingress(opening(protocol, at(places.pod, 1), where), "pods")
    sent = node.ingress(opening(protocol, at(places.pod, 2), where), "pods")
    assert sent.action == "pass"
    assert sent.verdicts == {"flows_full": 1, "translated": 1}
    assert ends(sent.packet) == f"{at(places.pod, 2)} > {at(places.there, 5353)}"


@pytest.mark.parametrize("protocol", ["tcp", "udp", "sctp"])
def test_a_client_that_cannot_be_masqueraded_is_dropped(
    node: PacketNode, places: Places, protocol: str
) -> None:
    """A client that needs SNAT and cannot get it is dropped."""
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.there, 5353)])
    came = node.ingress(opening(protocol, at(places.client, 1), where))
    left = node.egress(came.packet) if came.action == "pass" else came
    assert left.action == "drop"
