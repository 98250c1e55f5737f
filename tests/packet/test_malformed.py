# SPDX-License-Identifier: Apache-2.0
"""Packets that are cut short or contradict themselves are left alone, and counted as such.

The kernel does not accept a test frame that is shorter than the IP header it announces.
"""

import struct

import pytest

from tests.packet import wire
from tests.packet.errors import KINDS, error
from tests.packet.frames import Packet, at, opening, reply, segment
from tests.packet.node import PacketNode
from tests.packet.places import IPV4, Places
from tests.packet.services import serve

ETHERNET = 14


@pytest.fixture
def request_(node: PacketNode, places: Places, protocol: str) -> Packet:
    """Return a packet that would be translated if it were whole."""
    where = serve(node, places, "cluster", protocol, cluster=[at(places.there, 8080)])
    control = opening(protocol, at(places.pod, 50122), where)
    assert node.ingress(control, "pods").verdicts == {"translated": 1}
    return opening(protocol, at(places.pod, 50123), where)


def header(places: Places) -> int:
    return ETHERNET + (20 if places.version == 4 else 40)


def with_length(places: Places, frame: bytes, length: int) -> bytes:
    """Return the frame with another length of its IP packet in the header."""
    changed = bytearray(frame)
    if places.version == 4:
        struct.pack_into("!H", changed, ETHERNET + 2, length)
        struct.pack_into("!H", changed, ETHERNET + 10, 0)
        sum_ = wire.checksum(bytes(changed[ETHERNET : ETHERNET + 20]))
        struct.pack_into("!H", changed, ETHERNET + 10, sum_)
    else:
        struct.pack_into("!H", changed, ETHERNET + 4, length - 40)
    return bytes(changed)


def is_malformed(node: PacketNode, frame: bytes) -> bool:
    """Whether both hooks report the packet as malformed, and leave nothing behind."""
    ways = node.ingress(frame, "pods"), node.egress(frame), node.egress(frame, into=None)
    return all(way == ("pass", frame, {"malformed": 1}) for way in ways)


def test_a_cut_packet_is_malformed(node: PacketNode, places: Places, request_: Packet) -> None:
    """The packet is cut after any byte, and its length field is larger."""
    whole = bytes(request_)
    for size in range(header(places), len(whole)):
        assert is_malformed(node, whole[:size]), size


def test_a_packet_without_a_whole_header_is_malformed(
    node: PacketNode, places: Places, protocol: str, request_: Packet
) -> None:
    """A packet that is too short for a transport header is malformed."""
    needed = {"tcp": 20, "udp": 8, "sctp": 12}[protocol]
    for size in range(header(places), header(places) + needed):
        frame = with_length(places, bytes(request_)[:size], size - ETHERNET)
        assert is_malformed(node, frame), size


def test_length_inside(node: PacketNode, places: Places, protocol: str, request_: Packet) -> None:
    """A packet whose bytes exist, but end earlier by the IP header's length, is malformed."""
    needed = {"tcp": 20, "udp": 8, "sctp": 12}[protocol]
    network = header(places) - ETHERNET
    lengths = [*range(network, network + needed), len(request_) - ETHERNET + 1, 0xFFFF]
    for length in [*(range(20) if places.version == 4 else ()), *lengths]:
        frame = with_length(places, bytes(request_), length)
        assert is_malformed(node, frame), length


@IPV4
@pytest.mark.parametrize("words", [*range(5), 15])
def test_header_length(node: PacketNode, places: Places, request_: Packet, words: int) -> None:
    """The IPv4 header is shorter than the minimum, or longer than the packet."""
    frame = bytearray(bytes(request_))
    frame[ETHERNET] = 0x40 | words
    frame = frame[: ETHERNET + 4 * max(words, 5) - 1 + (words < 5) * 20]
    assert is_malformed(node, with_length(places, bytes(frame), len(frame) - ETHERNET))


@pytest.mark.parametrize("version", [0, 5, 7, 15])
def test_an_unknown_ip_version_is_malformed(
    node: PacketNode, request_: Packet, version: int
) -> None:
    frame = bytearray(bytes(request_))
    frame[ETHERNET] = version << 4 | frame[ETHERNET] & 15
    assert is_malformed(node, bytes(frame))


@pytest.mark.parametrize("kind", KINDS)
def test_errors_cut(node: PacketNode, places: Places, protocol: str, kind: str) -> None:
    """ICMP errors that are cut after any byte are translated correctly or not at all."""
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.there, 8080)])
    asked = node.through(opening(protocol, at(places.client, 50123), where))
    reply = bytes(error(kind, places.router, asked))
    for size in range(header(places), len(reply)):
        assert node.ingress(reply[:size])[:2] == ("pass", reply[:size])
        shorter = with_length(places, reply[:size], size - ETHERNET)
        came = node.ingress(shorter)
        assert came.action == "pass"
        assert (came.frame != shorter) == ("related" in came.verdicts)


@pytest.mark.parametrize("words", [0, 1, 4, 6, 15])
def test_data_offset(node: PacketNode, places: Places, words: int) -> None:
    """A TCP header that is longer than its packet, or shorter than a header, gets no answer."""
    where = serve(node, places, "balancer")
    request = segment(at(places.client, 50123), where)
    frame = bytearray(bytes(request))
    frame[header(places) + 12] = words << 4
    assert node.ingress(bytes(frame)).action != "redirect"


def test_udp_length(node: PacketNode, places: Places) -> None:
    """UDP's own length is left to the receiver; a correct checksum stays correct."""
    where = serve(node, places, "cluster", "udp", cluster=[at(places.there, 8080)])
    request = bytearray(bytes(opening("udp", at(places.pod, 50123), where)))
    for length in (0, 7, 9, 0xFFFF):
        struct.pack_into("!H", request, header(places) + 4, length)
        assert node.ingress(bytes(request), "pods").action == "pass"


def test_a_wrong_checksum_stays_wrong(node: PacketNode, places: Places, protocol: str) -> None:
    """A damaged packet stays recognizable, because its checksum stays wrong."""
    where = serve(node, places, "cluster", protocol, cluster=[at(places.there, 8080)])
    whole = opening(protocol, at(places.pod, 50123), where)
    for packet in (whole, reply(node.through(whole, "pods", "uplink"))):
        frame = bytearray(bytes(packet))
        frame[-1] ^= 0x40
        hook = node.ingress if packet is whole else node.egress
        out = hook(bytes(frame))
        assert out.frame != bytes(frame)
        assert wire.faults(out.frame) == wire.faults(bytes(frame)) != set()
