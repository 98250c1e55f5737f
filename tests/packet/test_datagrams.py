# SPDX-License-Identifier: Apache-2.0
"""A client's UDP port keeps its backend while the backend serves (kube-proxy.md 11), no longer."""

from tests.packet.frames import (
    SCTP,
    UDP,
    at,
    datagram,
    destination,
    ends,
    host_of,
    opening,
    reply,
    source,
)
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import serve, written


def test_a_flow_moves_when_its_backend_is_removed(
    node: PacketNode, places: Places, client: str, kind: str
) -> None:
    """If the backend is removed, the next datagram goes to another backend, and is answered."""
    backend, other = at(places.there, 5353), at(places.elsewhere, 5353)
    where = serve(node, places, kind, "udp", cluster=[backend])
    late = reply(node.through(datagram(client, where)))
    serve(node, places, kind, "udp", cluster=[other])
    asked = node.through(datagram(client, where))
    assert destination(asked) == other
    assert ends(node.through(reply(asked))) == f"{where} > {client}"
    again = node.through(datagram(client, where))
    assert ends(again) == ends(asked)
    assert node.maps["service_stats"].get(1)[0] == 2
    assert source(node.egress(node.ingress(late).packet).packet) in (where, backend)


def test_service_gone(node: PacketNode, places: Places, kind: str, client: str) -> None:
    """Another service's backend with the same id is not mistaken for the old one."""
    backend = at(places.there, 5353)
    where = serve(node, places, kind, "udp", cluster=[backend])
    node.through(datagram(client, where))
    node.withdraw(written(places, kind, "udp"))
    where = serve(node, places, kind, "udp", service=2, cluster=[at(places.elsewhere, 5353)])
    node.publish(1, [], cluster=[])
    assert destination(node.through(datagram(client, where))) == at(places.elsewhere, 5353)


def test_no_checksum(node: PacketNode, places: Places, client: str, kind: str) -> None:
    """A datagram that is sent without a checksum (RFC 768, RFC 6935) arrives without one."""
    where = serve(node, places, kind, "udp", cluster=[at(places.there, 5353)])
    asked = node.through(datagram(client, where, chksum=0))
    answer = node.through(datagram(destination(asked), source(asked), b"answer", chksum=0))
    assert ends(answer) == f"{where} > {client}"
    assert (asked[UDP].chksum, answer[UDP].chksum) == (0, 0)


def test_checksum_zero(node: PacketNode, places: Places) -> None:
    """A computed checksum of zero is sent as ffff: zero means none."""
    client, backend = at(places.client, 50123), at(places.there, 5353)
    node.settings("guard_nodeports")
    where = serve(node, places, "cluster", "udp", cluster=[backend])
    rest = datagram(client, backend, bytes(2))[UDP].chksum
    asked = node.ingress(datagram(client, where, rest.to_bytes(2, "big"))).packet
    assert ends(asked) == f"{client} > {backend}"
    assert asked[UDP].chksum == 0xFFFF


def test_no_source_port(node: PacketNode, places: Places, client: str, kind: str) -> None:
    """A datagram that wants no answer has no source port (RFC 768), and still arrives."""
    where = serve(node, places, kind, "udp", cluster=[at(places.there, 5353)])
    for _ in range(2):
        asked = node.through(datagram(at(host_of(client), 0), where))
        assert destination(asked) == at(places.there, 5353)


def test_crc_to_come(node: PacketNode, places: Places, client: str, kind: str) -> None:
    """SCTP's checksum is zero until the device computes it, so it is not updated."""
    where = serve(node, places, kind, "sctp", cluster=[at(places.there, 5353)])
    request = opening("sctp", client, where)
    request[SCTP].chksum = 0
    came = node.ingress(request).packet
    assert destination(came) == at(places.there, 5353)
    assert came[SCTP].chksum == 0
