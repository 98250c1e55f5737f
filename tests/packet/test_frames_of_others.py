# SPDX-License-Identifier: Apache-2.0
"""Frames whose MAC address is not that of the device where they come in."""

import pytest

from tests.packet.frames import OTHER, Ether, at, opening, reply, segment, to_another_host
from tests.packet.node import PacketNode
from tests.packet.places import V4, V6, Places
from tests.packet.services import exchange, ping, serve


@pytest.mark.parametrize("endpoints", [0, 1])
def test_nothing_is_opened_or_refused(
    node: PacketNode, places: Places, protocol: str, endpoints: int
) -> None:
    """Frames to other hosts pass unchanged, to any service; the stack drops them."""
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.here, 8080)] * endpoints)
    frame = to_another_host(opening(protocol, at(places.client, 50123), where))
    assert node.ingress(frame) == ("pass", bytes(frame), {"passed": 1})
    assert not node.flows(protocol)


def test_nothing_ends(node: PacketNode, places: Places) -> None:
    """A copy of a reset to another host ends no flow, and replies to another host are not
    translated.
    """
    client, backend = at(places.client, 50123), at(places.there, 8080)
    where = serve(node, places, "nodeport", cluster=[backend])
    request = exchange(node, "tcp", client, where)
    node.through(segment(client, where, "A"))
    flows = node.flows()
    for packet in (segment(client, where, "RA"), reply(request, "FA")):
        frame = to_another_host(packet)
        assert node.ingress(frame) == ("pass", bytes(frame), {"passed": 1})
    assert node.flows() == flows


@pytest.mark.parametrize("mac", ["ff:ff:ff:ff:ff:ff", "01:00:5e:00:00:01"])
def test_frames_to_all(node: PacketNode, places: Places, protocol: str, mac: str) -> None:
    """Broadcasts and multicasts are for this host too: clusters of hosts share an address in this
    way.
    """
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.here, 8080)])
    frame = to_another_host(opening(protocol, at(places.client, 50123), where), mac)
    assert node.ingress(frame).verdicts == {"translated": 1}


@pytest.mark.parametrize(
    ("words", "own", "verdict"),
    [
        (["bridged"], [OTHER], "translated"),
        (["bridged"], ["02:00:00:00:00:98"], "passed"),
        (["bridged"], [], "passed"),
        ([], [], "translated"),
    ],
    ids=["the bridge", "another machine", "own addresses are unknown", "another switch"],
)
def test_port_of_a_switch(
    node: PacketNode, places: Places, protocol: str, words: list[str], own: list[str], verdict: str
) -> None:
    """At a bridge's port a frame for another device of this node is translated. At another switch's
    port all frames are translated: the switch may be a router without a device, like Open vSwitch.
    """
    node.device("uplink", V4.node, V6.node, *words)
    for mac in own:
        node.put("link_addresses", mac, 1)
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.here, 8080)])
    frame = to_another_host(opening(protocol, at(places.client, 50123), where))
    assert node.ingress(frame).verdicts == {verdict: 1}


def test_what_a_bridge_passes_on(node: PacketNode, places: Places) -> None:
    """Pings and damaged packets for another machine concern nobody, though flows are looked for."""
    node.device("uplink", V4.node, V6.node, "bridged")
    request = ping(places, places.unallocated, 64)
    for packet in (request, Ether(bytes(request)[:-20])):
        frame = to_another_host(packet)
        assert node.ingress(frame) == ("pass", bytes(frame), {"passed": 1})
