# SPDX-License-Identifier: Apache-2.0
"""A flood of half-open flows deletes only half-open ones.

Its packets are made by changing bytes of one packet; their outcomes are not checked like those of
other packets.
"""

import struct
from collections.abc import Iterator

import pytest

from ebpflb.kernel.maps import layout
from ebpflb.kernel.maps.layout import ffi
from ebpflb.kernel.programs import loader
from ebpflb.kernel.programs.compiler import Compiled
from tests.packet.conftest import Loaded, loaded
from tests.packet.frames import Packet, at, destination, ends, opening, reply, segment
from tests.packet.node import PacketNode
from tests.packet.places import V4, Places
from tests.packet.services import serve

HALF_OPEN = int(ffi.typeof("enum half_open_limit").relements["HALF_OPEN_FLOWS"])
ENTRIES = 3  # of a flow whose SNAT is pending
ROOM = ENTRIES * HALF_OPEN + 1024  # some are in the kernel's lists of each CPU
FLOOD = HALF_OPEN + 4000
SOURCE_AT, REPLY_TO_AT = 14 + 12, 14 + 16  # in a frame of IPv4


@pytest.fixture(scope="module")
def datapath(compiled: Compiled) -> Iterator[Loaded]:
    """Load maps of flows with hardly more room than the half-open flows may take."""
    specs = {
        name: layout.MAPS[name]._replace(entries=ROOM) for name in ("tcp_flows", "other_flows")
    }
    with loaded(compiled, **specs) as found:
        yield found


@pytest.fixture
def places() -> Places:
    return V4


def flood(node: PacketNode, first: Packet, *answers: Packet, count: int = FLOOD) -> None:
    """Yield requests from this many addresses, and the backend's answer to each."""
    frames = [("ingress", bytearray(bytes(first)), SOURCE_AT)]
    frames += [("egress", bytearray(bytes(each)), REPLY_TO_AT) for each in answers]
    for number in range(count):
        for hook, frame, at_ in frames:
            frame[at_ : at_ + 4] = struct.pack("!I", (172 << 24) + (16 << 16) + number)
            ran = loader.run_program(node.hooks[hook], bytes(frame), ifindex=node.devices["uplink"])
            assert ran.retval == loader.PASS


def established(node: PacketNode, protocol: str, client: str, where: str) -> Packet:
    """Return a request of a flow that both sides have used."""
    asked = node.through(opening(protocol, client, where))
    node.through(reply(asked))
    if protocol != "tcp":
        return asked
    return node.through(segment(client, where, "A", seq=1001, ack=5001))


@pytest.mark.parametrize("answered", [False, True], ids=["unanswered", "answered"])
def test_established_connection_stays(node: PacketNode, places: Places, answered: bool) -> None:
    """No established connection is evicted, even by more half-open connections than there is room
    for.
    """
    where = serve(node, places, "cluster", cluster=[at(places.there, 8080)])
    client, forged = at(places.pod, 50123), at("172.16.0.0", 4000)
    got = established(node, "tcp", client, where)
    first = segment(forged, where)
    answers = [reply(node.ingress(first).packet)] if answered else []
    flood(node, first, *answers)
    assert ends(node.through(segment(client, where, "PA", seq=1001, ack=5001))) == ends(got)
    assert ends(node.through(reply(got, "PA"))) == f"{where} > {client}"
    assert len(node.flows()) <= ENTRIES * HALF_OPEN + 2
    made, ended, _, displaced = node.flow_counters()
    assert made - ended == len(node.flows())  # the LRU has evicted nothing
    assert displaced >= FLOOD - HALF_OPEN


def test_answered_datagrams_stay(node: PacketNode, places: Places) -> None:
    """No flow with a reply is deleted, even by more datagrams without a reply than there is room
    for.
    """
    where = serve(node, places, "cluster", "udp", cluster=[at(places.there, 53)])
    client = at(places.pod, 50123)
    got = established(node, "udp", client, where)
    before = node.flows("udp")
    flood(node, opening("udp", at("172.16.0.0", 4000), where))
    assert node.flows("udp").items() >= before.items()
    assert ends(node.through(reply(got))) == f"{where} > {client}"


def test_place_of_an_established_flow(node: PacketNode, places: Places) -> None:
    """A connection that has become established stays when a newer flow takes its place."""
    where = serve(node, places, "cluster", cluster=[at(places.there, 8080)])
    got = established(node, "tcp", at(places.pod, 50123), where)
    ((_, place),) = [it for it in node.maps["half_open"].items() if it[1].created]
    node.maps["half_open"].write([(number, place) for number in range(HALF_OPEN)])
    node.through(segment(at(places.pod, 50124), where))
    assert len(node.flows()) == 4
    assert ends(node.through(reply(got, "PA"))) == f"{where} > {at(places.pod, 50123)}"
    assert node.flow_counters()[3] == 0


def test_place_of_a_half_open_flow(node: PacketNode, places: Places) -> None:
    """All entries of a half-open flow are deleted with it, even its masquerade's."""
    where = serve(node, places, "nodeport", cluster=[at(places.there, 8080)])
    node.through(segment(at(places.client, 50123), where))
    ((_, place),) = [it for it in node.maps["half_open"].items() if it[1].created]
    node.maps["half_open"].write([(number, place) for number in range(HALF_OPEN)])
    other = node.through(segment(at(places.client, 50124), where))
    assert destination(other) == at(places.there, 8080)
    assert len(node.flows()) == 4
    assert all("50123" not in name for name in node.flows())
    assert node.flow_counters()[3] == 1


def test_a_place_with_the_replies_of_another_flow_ends_neither(
    node: PacketNode, places: Places, protocol: str
) -> None:
    """Two CPUs may write a place at once: then the place belongs to no flow."""
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.there, 8080)])
    for port in (50123, 50124):
        node.through(opening(protocol, at(places.client, port), where))
    before = node.flows(protocol)
    one, other = (it for _, it in node.maps["half_open"].items() if it.created)
    torn = one._replace(reply=other.reply)
    node.maps["half_open"].write([(number, torn) for number in range(2 * HALF_OPEN)])
    node.through(opening(protocol, at(places.client, 50125), where))
    assert node.flows(protocol).items() >= before.items()
    assert node.flow_counters(protocol)[3] == 0


@pytest.mark.parametrize("flags", ["A", "PA", "FA"])
def test_unanswered_client(node: PacketNode, places: Places, flags: str) -> None:
    """A connection whose backend has not answered stays half-open, whatever its client sends."""
    where, client = serve(node, places, "nodeport", cluster=[at(places.there, 8080)]), places.client
    node.through(segment(at(client, 50123), where))
    node.through(segment(at(client, 50123), where, flags, seq=1001, ack=5001))
    assert all("seen" not in flow.flags for flow in node.flows().values())
