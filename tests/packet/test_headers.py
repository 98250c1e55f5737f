# SPDX-License-Identifier: Apache-2.0
"""Parts around and between headers, and packets that the programs do not handle."""

import pytest
from scapy.layers.inet import IPOption_NOP
from scapy.layers.inet6 import (
    IPv6ExtHdrDestOpt,
    IPv6ExtHdrFragment,
    IPv6ExtHdrHopByHop,
    IPv6ExtHdrRouting,
    PadN,
)
from scapy.layers.l2 import ARP, Dot1Q

from ebpflb.kernel.programs import loader
from tests.packet.frames import (
    IP,
    UDP,
    Ether,
    IPv6,
    Packet,
    Raw,
    at,
    built,
    carrier,
    datagram,
    ends,
    host_of,
    opening,
    port_of,
)
from tests.packet.node import PacketNode
from tests.packet.places import V4, V6, Places
from tests.packet.services import serve

WALKED = 6  # extension headers; RFC 8200 4.1 recommends no order with more


def served(node: PacketNode, places: Places, protocol: str = "udp") -> tuple[str, str]:
    """Return a pod and a cluster IP with an endpoint, which are known to work."""
    where = serve(node, places, "cluster", protocol, cluster=[at(places.there, 8080)])
    control = opening(protocol, at(places.pod, 50122), where)
    assert node.ingress(control, "pods").verdicts == {"translated": 1}
    return at(places.pod, 50123), where


def untouched(node: PacketNode, packet: Packet | bytes) -> bool:
    """Whether both hooks leave the packet alone, as the node's own packet or not."""
    frame = bytes(packet)
    ways = node.ingress(frame, "pods"), node.egress(frame), node.egress(frame, into=None)
    return all(way == ("pass", frame, {"passed": 1}) for way in ways)


@pytest.mark.parametrize("words", range(1, 11))
def test_ipv4_options_move_the_ports(node: PacketNode, protocol: str, words: int) -> None:
    """IPv4 options move the ports, up to the maximum of ten words."""
    pod, where = served(node, V4, protocol)
    request = opening(protocol, pod, where)
    request[IP].options = [IPOption_NOP()] * (4 * words)
    for field in ("ihl", "len", "chksum"):
        delattr(request[IP], field)
    request = built(request)
    assert request[IP].ihl == 5 + words
    asked = node.through(request, "pods", "uplink")
    assert ends(asked) == f"{pod} > {at(V4.there, 8080)}"


EXTENSIONS = {
    "hop by hop": [IPv6ExtHdrHopByHop()],
    "options": [IPv6ExtHdrDestOpt()],
    "long options": [IPv6ExtHdrDestOpt(options=[PadN(optdata=bytes(200))])],
    "routing": [IPv6ExtHdrRouting(type=3)],
    "whole": [IPv6ExtHdrFragment(id=1)],
    "several": [IPv6ExtHdrHopByHop(), IPv6ExtHdrRouting(type=3), IPv6ExtHdrFragment(id=1)],
    "as many as are walked": [IPv6ExtHdrDestOpt()] * WALKED,
}


def extended(pod: str, where: str, headers: list[Packet]) -> Packet:
    packet = carrier(host_of(pod), host_of(where))
    for header in headers:
        packet = packet / header.copy()
    return built(packet / UDP(sport=port_of(pod), dport=port_of(where)) / Raw(b"question"))


@pytest.mark.parametrize("headers", EXTENSIONS.values(), ids=EXTENSIONS)
def test_ipv6_extension_headers_are_skipped(node: PacketNode, headers: list[Packet]) -> None:
    pod, where = served(node, V6)
    asked = node.through(extended(pod, where, headers), "pods", "uplink")
    assert ends(asked) == f"{pod} > {at(V6.there, 8080)}"


def test_too_many_extensions(node: PacketNode) -> None:
    """A packet with more extension headers than anyone sends is left alone."""
    pod, where = served(node, V6)
    assert untouched(node, extended(pod, where, [IPv6ExtHdrDestOpt()] * (WALKED + 1)))


def test_an_authenticated_packet_is_not_changed(node: PacketNode) -> None:
    """An authenticated packet (RFC 4302) must not be changed."""
    pod, where = served(node, V6)
    request = extended(pod, where, [IPv6ExtHdrDestOpt()])
    request[IPv6].nh = 51
    assert untouched(node, request)


@pytest.mark.parametrize("tags", [1, 2])
def test_frames_of_a_vlan_are_left_to_its_device(
    node: PacketNode, places: Places, protocol: str, tags: int
) -> None:
    pod, where = served(node, places, protocol)
    request = opening(protocol, pod, where)
    tagged = Ether(src=request.src, dst=request.dst)
    for number in range(tags):
        tagged = tagged / Dot1Q(vlan=number + 5)
    assert untouched(node, tagged / request.payload)


def tagged(packet: Packet, *tags: Packet) -> bytes:
    """Return the frame with these tags, the outermost first."""
    frame = Ether(src=packet.src, dst=packet.dst)
    for tag in tags:
        frame = frame / tag
    return bytes(frame / packet.payload)


@pytest.mark.parametrize("kind", [0x8100, 0x88A8])
@pytest.mark.parametrize("priority", range(8))
def test_priority_tag_is_taken_off(
    node: PacketNode, places: Places, protocol: str, priority: int, kind: int
) -> None:
    """A tag with id 0 is no VLAN: the frame is served, and the tag is removed."""
    pod, where = served(node, places, protocol)
    frame = tagged(opening(protocol, pod, where), Dot1Q(vlan=0, prio=priority))
    frame = frame[:12] + kind.to_bytes(2, "big") + frame[14:]
    came = node.ingress(frame, "pods")
    assert came.verdicts == {"translated": 1}
    assert ends(came.packet) == f"{pod} > {at(places.there, 8080)}"
    assert len(came.frame) == len(frame) - 4


def test_vlan_behind_a_priority_tag(node: PacketNode, places: Places, protocol: str) -> None:
    """A frame with a VLAN's id belongs to the VLAN, even if there is a priority tag before or
    behind it.
    """
    pod, where = served(node, places, protocol)
    request = opening(protocol, pod, where)
    for tags in ([0, 5], [5, 0]):
        frame = tagged(request, *(Dot1Q(vlan=number, prio=3) for number in tags))
        ran = loader.run_program(node.hooks["ingress"], frame, ifindex=node.devices["pods"])
        assert (ran.retval, ran.packet[-len(request.payload) :]) == (
            loader.PASS,
            bytes(request.payload),
        )


def test_priority_tag_of_a_refused_packet(node: PacketNode, places: Places) -> None:
    """The reset of a frame with a priority tag has none, like all the node's own frames."""
    where = serve(node, places, "balancer")
    request = opening("tcp", at(places.client, 50123), where)
    came = node.ingress(tagged(request, Dot1Q(vlan=0, prio=5)))
    assert (came.action, came.verdicts) == ("redirect", {"refused": 1})
    assert came.packet.type == request.type
    assert ends(came.packet) == f"{where} > {at(places.client, 50123)}"


@pytest.mark.parametrize("offset", [0, 185])
def test_priority_tag_of_a_fragment(node: PacketNode, offset: int) -> None:
    """Fragments with a priority tag are translated like fragments without."""
    pod, where = served(node, V4)
    whole = opening("udp", pod, where)
    whole[IP].flags, whole[IP].id = "MF", 77
    del whole[IP].chksum
    first = built(whole)
    assert first[IP].flags == "MF"
    later = built(carrier(host_of(pod), host_of(where), id=77, frag=185, proto=17) / Raw(b"rest"))
    came = node.ingress(tagged(first, Dot1Q(vlan=0, prio=1)), "pods")
    assert came.verdicts == {"translated": 1}
    if offset:
        came = node.ingress(tagged(later, Dot1Q(vlan=0, prio=1)), "pods")
        assert came.verdicts == {"established": 1}
    assert came.packet[IP].dst == V4.there


def test_not_ip(node: PacketNode) -> None:
    served(node, V4)
    frames = [
        Ether(dst="ff:ff:ff:ff:ff:ff", src="02:00:00:00:00:fe") / ARP(pdst=V4.node),
        Ether(dst="01:80:c2:00:00:00", src="02:00:00:00:00:fe", type=38) / Raw(bytes(38)),
        Ether(dst="01:80:c2:00:00:0e", src="02:00:00:00:00:fe", type=0x88CC) / Raw(bytes(46)),
        Ether(dst="02:00:00:00:00:01", src="02:00:00:00:00:fe", type=0) / Raw(bytes(46)),
    ]
    assert all(untouched(node, frame) for frame in frames)


@pytest.mark.parametrize("number", [2, 4, 41, 46, 47, 50, 59, 103, 112, 136, 255])
def test_other_protocols(node: PacketNode, places: Places, number: int) -> None:
    """Packets of other protocols pass, whatever their bytes at the place of ports."""
    pod, where = served(node, places)
    request = opening("udp", pod, where)
    if places.version == 4:
        request[IP].proto = number
        del request[IP].chksum
    else:
        request[IPv6].nh = number
    assert untouched(node, request)


def test_mapped_addresses_in_ipv6_are_not_ipv4(node: PacketNode) -> None:
    """An IPv6 packet between mapped addresses is not IPv4: it matches no flow and no frontend."""
    served(node, V4)
    mapped = [f"::ffff:{host}" for host in (V4.pod, V4.cluster_ip)]
    packet = carrier(*mapped) / UDP(sport=50122, dport=80) / Raw(b"question")
    assert untouched(node, built(packet))
    packet = carrier(*mapped) / UDP(sport=50123, dport=80) / Raw(b"question")
    assert untouched(node, built(packet))


def test_types_swapped(node: PacketNode) -> None:
    """A frame whose type names the other family is malformed."""
    for places, kind in ((V4, 0x86DD), (V6, 0x0800)):
        pod, where = served(node, places)
        request = datagram(pod, where, bytes(64))
        request.type = kind
        frame = bytes(request)
        assert node.ingress(frame) == ("pass", frame, {"malformed": 1})
