# SPDX-License-Identifier: Apache-2.0
"""Packets to an external address without an endpoint go on to the router, if the Service says so.

They are neither dropped nor refused, as in KEP-6272's table; all other packets are handled as
usual.
"""

from typing import Any

import pytest

from tests.packet.forwarding import PASSED, TRIAL, became, grow_older, sent_on
from tests.packet.frames import at, destination, opening, segment
from tests.packet.node import PacketNode, knows_ingress_device
from tests.packet.places import Places
from tests.packet.services import serve

EXTERNAL = ("balancer", "external")
external = pytest.mark.parametrize("kind", EXTERNAL)
endpoints = pytest.mark.parametrize("endpoints", ["elsewhere", "none"])


def published(
    node: PacketNode, places: Places, kind: str, protocol: str, endpoints: str, *words: str
) -> str:
    """Return where a client reaches a frontend under policy Local, without an endpoint here."""
    lists: dict[str, Any] = {"cluster": [at(places.there, 8080)]} if endpoints != "none" else {}
    return serve(node, places, kind, protocol, "local", "passthrough", *words, **lists)


@external
@endpoints
def test_from_outside(
    node: PacketNode, places: Places, protocol: str, kind: str, endpoints: str
) -> None:
    """The packet stays as it is, gets no flow, and is counted with its own verdict."""
    where = published(node, places, kind, protocol, endpoints)
    for number in range(3):
        request = opening(protocol, at(places.client, 50_000 + number), where)
        assert node.ingress(request) == ("pass", bytes(request), {"passed_through": 1})
    assert not node.flows(protocol)
    assert node.maps["service_stats"].get(1)[2:4] == (0, 0)  # neither refused nor dropped


@external
def test_an_endpoint_here_serves(
    node: PacketNode, places: Places, protocol: str, kind: str
) -> None:
    """With an endpoint here the result is the same as without the setting."""
    here = [at(places.here, 8080)]
    where = serve(
        node, places, kind, protocol, "local", "passthrough", cluster=here, local=here, here=here
    )
    came = node.ingress(opening(protocol, at(places.client, 50123), where))
    assert (destination(came.packet), came.verdicts) == (here[0], {"translated": 1})


@external
@endpoints
def test_from_a_pod(
    node: PacketNode, places: Places, protocol: str, kind: str, endpoints: str
) -> None:
    """Endpoints of any node serve a pod; its packets go on only without any endpoint."""
    node.settings("detect_local")
    where = published(node, places, kind, protocol, endpoints)
    came = node.ingress(opening(protocol, at(places.pod, 50123), where), "pods")
    expected = {"translated": 1} if endpoints == "elsewhere" else {"passed_through": 1}
    assert came.verdicts == expected


@external
@endpoints
def test_from_the_node(
    node: PacketNode, places: Places, protocol: str, kind: str, endpoints: str
) -> None:
    """The node's packet has the same result as a pod's; otherwise the socket would be
    translated.
    """
    where = published(node, places, kind, protocol, endpoints)
    request = opening(protocol, at(places.node, 50123), where)
    expected = {"passed": 1} if endpoints == "elsewhere" else {"passed_through": 1}
    assert node.egress(request, into=None) == ("pass", bytes(request), expected)


def test_source_ranges_still_hold(node: PacketNode, places: Places, protocol: str) -> None:
    """A client that the Service does not admit is dropped."""
    where = published(node, places, "balancer", protocol, "none", "restricted")
    node.admit(1, f"{places.other_client}/{32 if places.version == 4 else 128}")
    came = node.ingress(opening(protocol, at(places.client, 50123), where))
    assert (came.action, came.verdicts) == ("drop", {"source_denied": 1})


@pytest.mark.skipif(
    not knows_ingress_device(), reason="a test run cannot name the device where its packet came in"
)
@external
@endpoints
def test_connections_to_elsewhere_go_on(
    node: PacketNode, places: Places, kind: str, endpoints: str
) -> None:
    """Connections to the other cluster stay, however long no reply passes: replies may take another
    way.
    """
    where = published(node, places, kind, "tcp", endpoints)
    client = at(places.client, 50123)
    for flags in ("A", "PA", "FA", "R"):
        left = sent_on(node, segment(client, where, flags))
        assert became(left) == PASSED
        grow_older(node, TRIAL)
        assert became(sent_on(node, left.packet)) == PASSED  # with a smaller TTL
