# SPDX-License-Identifier: Apache-2.0
"""ICMP errors about translated packets reach their sender, and quote what it sent (RFC 5508 4)."""

import struct
from typing import Any

import pytest
from scapy.layers.inet6 import IPv6ExtHdrDestOpt

from tests.packet import errors
from tests.packet.errors import about, error, redirect
from tests.packet.frames import (
    IP,
    UDP,
    IPv6,
    Packet,
    at,
    built,
    carrier,
    ends,
    fragments,
    host_of,
    network,
    opening,
    port_of,
    quoted,
    reply,
    source,
)
from tests.packet.node import PacketNode
from tests.packet.places import IPV4, Places
from tests.packet.services import serve


@pytest.fixture(params=list(errors.KINDS))
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


def parties(packet: Packet) -> str:
    return f"{network(packet).src} > {network(packet).dst}"


def masqueraded(node: PacketNode, places: Places, protocol: str) -> tuple[str, str, Packet]:
    """Return a client outside, the NodePort, and its request as it leaves, masqueraded."""
    where = serve(node, places, "nodeport", protocol, cluster=[at(places.there, 8080)])
    client = at(places.client, 50123)
    return client, where, node.through(opening(protocol, client, where))


def plain(node: PacketNode, places: Places, protocol: str) -> tuple[str, str, Packet]:
    """Return a pod, the cluster IP, and its request as it leaves, with its address."""
    where = serve(node, places, "cluster", protocol, cluster=[at(places.there, 8080)])
    pod = at(places.pod, 50123)
    return pod, where, node.through(opening(protocol, pod, where), "pods", "uplink")


def test_request_masqueraded(node: PacketNode, places: Places, protocol: str, kind: str) -> None:
    """A router before the backend reports: its error quotes the packet to the frontend."""
    client, where, request = masqueraded(node, places, protocol)
    icmp = error(kind, places.router, request)
    came = node.ingress(icmp)
    assert came.verdicts == {"related": 1}
    assert quoted(came.packet) == f"{client} > {at(places.there, 8080)}"
    received = node.through(icmp)
    assert parties(received) == f"{places.router} > {host_of(client)}"
    assert quoted(received) == f"{client} > {where}"
    assert about(received) == about(icmp)


def test_an_error_about_a_request_is_translated(
    node: PacketNode, places: Places, protocol: str, kind: str
) -> None:
    """A router's error about a request comes back translated, also if the backend sees the
    client.
    """
    pod, where, request = plain(node, places, protocol)
    icmp = error(kind, places.router, request)
    received = node.through(icmp, "uplink", "pods")
    assert parties(received) == f"{places.router} > {host_of(pod)}"
    assert quoted(received) == f"{pod} > {where}"
    assert about(received) == about(icmp)


@pytest.mark.parametrize("flow", [masqueraded, plain])
def test_backend_complains(node: PacketNode, places: Places, protocol: str, flow: Any) -> None:
    """An error of the backend itself comes from the frontend: its address is not shown."""
    client, where, request = flow(node, places, protocol)
    icmp = error("unreachable", places.there, request)
    received = node.through(icmp, "uplink", "pods" if flow is plain else "uplink")
    assert parties(received) == f"{host_of(where)} > {host_of(client)}"
    assert quoted(received) == f"{client} > {where}"


def test_reply_masqueraded(node: PacketNode, places: Places, protocol: str, kind: str) -> None:
    """A router before the client reports: its error quotes the packet that the backend sent to this
    node.
    """
    client, _, request = masqueraded(node, places, protocol)
    answer = node.through(reply(request))
    received = node.through(error(kind, places.other_client, answer))
    assert parties(received) == f"{places.other_client} > {places.there}"
    assert quoted(received) == ends(reply(request))
    assert client != places.other_client


def test_an_error_about_a_reply_is_translated(
    node: PacketNode, places: Places, protocol: str, kind: str
) -> None:
    """A router's error about a reply comes back translated, also if the backend sees the client."""
    _, _, request = plain(node, places, protocol)
    answer = node.through(reply(request), "uplink", "pods")
    icmp = error(kind, places.bridge, answer)
    received = node.through(icmp, "pods", "uplink")
    assert parties(received) == f"{places.bridge} > {places.there}"
    assert quoted(received) == ends(reply(request))
    assert about(received) == about(icmp)


def test_client_complains(node: PacketNode, places: Places, protocol: str) -> None:
    """An error of a masqueraded client comes from this node."""
    _, _, request = masqueraded(node, places, protocol)
    answer = node.through(reply(request))
    received = node.through(error("unreachable", places.client, answer))
    assert parties(received) == f"{places.node} > {places.there}"
    assert quoted(received) == ends(reply(request))


@pytest.mark.parametrize("size", [8, 9, 20, 64])
def test_a_quote_needs_only_the_ports(
    node: PacketNode, places: Places, protocol: str, size: int
) -> None:
    """An error is translated if its quote includes the ports (RFC 792: 8 bytes)."""
    client, where, request = masqueraded(node, places, protocol)
    received = node.through(error("unreachable", places.router, request, size=size))
    assert quoted(received) == f"{client} > {where}"


@pytest.mark.parametrize("size", [0, 1, 3, 4, 7])
def test_quotes_too_little(node: PacketNode, places: Places, protocol: str, size: int) -> None:
    """An error that does not quote enough is left alone."""
    _, _, request = masqueraded(node, places, protocol)
    icmp = error("unreachable", places.router, request, size=size)
    assert node.ingress(icmp) == ("pass", bytes(icmp), {"passed": 1})


@IPV4
def test_quoted_options(node: PacketNode, places: Places) -> None:
    """The quoted header may have got options on its way; the error is still translated."""
    client, where, request = masqueraded(node, places, "udp")
    inner = request.copy()
    inner[IP].options = [errors.NOP] * 4
    del inner[IP].ihl, inner[IP].len, inner[IP].chksum
    received = node.through(error("unreachable", places.router, built(inner)))
    assert quoted(received) == f"{client} > {where}"


def test_outer_options(node: PacketNode, places: Places) -> None:
    """The error's own header may have options."""
    client, where, request = masqueraded(node, places, "udp")
    icmp = error("unreachable", places.router, request)
    if IP in icmp:
        icmp[IP].options = [errors.NOP] * 4
        del icmp[IP].ihl, icmp[IP].len, icmp[IP].chksum
    else:
        message = icmp[IPv6].payload
        icmp = carrier(places.router, places.node) / IPv6ExtHdrDestOpt() / message
    came = node.ingress(built(icmp))
    assert came.verdicts == {"related": 1}
    quote = node.egress(came.packet).frame[-len(request[UDP]) :]
    assert struct.unpack_from("!HH", quote) == (port_of(client), port_of(where))


def test_port_changed(node: PacketNode, places: Places, protocol: str) -> None:
    """If the client's port was changed, the error comes back to the client's own port."""
    there, client = [at(places.there, 8080)], at(places.pod, 50123)
    for number, kind in enumerate(("cluster", "external"), 1):
        where = serve(
            node, places, kind, protocol, "local", service=number, cluster=there, local=there
        )
        request = node.through(opening(protocol, client, where), "pods", "uplink")
    assert source(request) != client
    received = node.through(error("too big", places.router, request), "uplink", "pods")
    assert quoted(received) == f"{client} > {where}"
    answer = node.through(reply(request), "uplink", "pods")
    assert ends(answer) == f"{where} > {client}"
    received = node.through(error("too big", places.bridge, answer), "pods", "uplink")
    assert quoted(received) == ends(reply(request))


def test_foreign_flow(node: PacketNode, places: Places, protocol: str, kind: str) -> None:
    """Errors about other packets pass both hooks unchanged."""
    client, where, _ = masqueraded(node, places, protocol)
    for one in (
        opening(protocol, at(places.node, 50123), at(places.there, 8080)),
        opening(protocol, client, at(places.there, 8080)),
        opening(protocol, at(places.client, 50124), where),
    ):
        icmp = error(kind, places.router, one)
        assert node.ingress(icmp) == ("pass", bytes(icmp), {"passed": 1})


def test_wrong_receiver(node: PacketNode, places: Places, protocol: str, kind: str) -> None:
    """An error about a packet is only translated if it goes to that packet's sender; otherwise it
    is forged.
    """
    _, _, request = masqueraded(node, places, protocol)
    icmp = error(kind, places.router, request, to=places.pod)
    assert node.ingress(icmp) == ("pass", bytes(icmp), {"passed": 1})


def test_about_an_error(node: PacketNode, places: Places, kind: str) -> None:
    """An error that quotes ICMP belongs to no flow."""
    _, _, request = masqueraded(node, places, "udp")
    icmp = error(kind, places.router, error("unreachable", places.node, reply(request)))
    assert node.ingress(icmp) == ("pass", bytes(icmp), {"passed": 1})


def test_about_a_first_fragment(node: PacketNode, places: Places) -> None:
    """An error that quotes a fragment with ports is translated, so its sender learns the MTU."""
    client, where, request = masqueraded(node, places, "udp")
    sender, _, backend = ends(request).partition(" > ")
    first, *_ = fragments(sender, backend)
    received = node.through(error("too big", places.router, first))
    assert quoted(received) == f"{client} > {where}"


def test_about_a_later_fragment(node: PacketNode, places: Places) -> None:
    """An error that quotes a fragment without ports is left alone."""
    _, _, request = masqueraded(node, places, "udp")
    sender, _, backend = ends(request).partition(" > ")
    _, later, *_ = fragments(sender, backend)
    icmp = error("unreachable", places.router, later)
    assert node.ingress(icmp) == ("pass", bytes(icmp), {"passed": 1})


@pytest.mark.parametrize("with_link_address", [False, True])
def test_a_redirect_is_dropped(
    node: PacketNode, places: Places, protocol: str, with_link_address: bool
) -> None:
    """A redirect about a packet of a flow is dropped: later packets would bypass this node."""
    _, _, request = plain(node, places, protocol)
    flow = [request, reply(request)]
    others = [opening(protocol, at(places.pod, 50124), at(places.there, 8080))]
    for packet in flow + others:
        icmp = redirect(places.bridge, packet, with_link_address=with_link_address)
        went = ("pass", {"passed": 1}) if packet in others else ("drop", {"redirect": 1})
        found = node.egress(icmp, "pods", None)
        assert (found.action, found.verdicts) == went
        assert found.frame == bytes(icmp)


def test_icmp_that_is_no_error_is_left_alone(node: PacketNode, places: Places) -> None:
    """ICMP that is not an error is left alone, whatever its data look like."""
    _, _, request = masqueraded(node, places, "udp")
    for number in errors.QUERIES[places.version]:
        head = bytes([number, 0, 0, 0, 0, 0, 0, 0])
        message = built(
            carrier(places.router, places.node, **errors.PROTOCOL[places.version])
            / (head + bytes(request)[14:])
        )
        assert node.ingress(message)[:2] == ("pass", bytes(message))
