# SPDX-License-Identifier: Apache-2.0
"""A client of a service without endpoints is refused at once, as by a host without a listener."""

import struct

import pytest

from ebpflb.kernel.maps.bpf_map import Counters
from tests.packet.budgets import allow
from tests.packet.frames import ICMP, TCP, Packet, at, ends, host_of, network, opening, segment
from tests.packet.node import PacketNode
from tests.packet.places import Places
from tests.packet.services import KINDS, serve

ETHERNET = 14


def answered(node: PacketNode, request: Packet) -> Packet:
    """Return the answer to a refused packet, which goes back the same way."""
    came = node.ingress(request)
    assert (came.action, came.verdicts) == ("redirect", {"refused": 1})
    answer = came.packet
    assert (answer.src, answer.dst) == (request.dst, request.src)
    assert (network(answer).src, network(answer).dst) == (
        network(request).dst,
        network(request).src,
    )
    assert (answer.ttl if "IP" in answer else answer.hlim) == 64
    assert len(came.frame) == ETHERNET + (answer.len if "IP" in answer else 40 + answer.plen)
    return answer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sender", ["client", "pod"])
def test_every_kind(
    node: PacketNode, places: Places, protocol: str, kind: str, sender: str
) -> None:
    """A request is refused at every frontend, for every client, also under policy Local."""
    for words in ((), ("local",)):
        where = serve(node, places, kind, protocol, *words)
        answered(node, opening(protocol, at(getattr(places, sender), 50123), where))
    assert node.maps["service_stats"].get(1)[2] == 2
    assert not node.flows(protocol)


@pytest.mark.parametrize(
    ("flags", "payload", "taken"),
    [("S", b"", 1), ("S", b"fast open", 10), ("SEC", b"", 1), ("SF", b"", 2), ("SPU", b"odd", 4)],
)
@pytest.mark.parametrize("seq", [0, 1000, 0xFFFFFFFF])
def test_a_syn_is_reset(
    node: PacketNode, places: Places, flags: str, payload: bytes, taken: int, seq: int
) -> None:
    """A SYN is reset: sequence number 0, everything acknowledged (RFC 9293 3.10.7.1)."""
    where, client = serve(node, places, "balancer"), at(places.client, 50123)
    request = segment(client, where, flags, payload=payload, seq=seq, options=[("MSS", 1460)])
    answer = answered(node, request)
    assert ends(answer) == f"{where} > {client}"
    reset = answer[TCP]
    assert (str(reset.flags), reset.seq, reset.ack) == ("RA", 0, (seq + taken) % 2**32)
    assert (reset.dataofs, reset.window, bytes(reset.payload)) == (5, 0, b"")


@pytest.mark.parametrize("padding", [0, 6, 22])
def test_padding_is_not_sent_back(node: PacketNode, places: Places, padding: int) -> None:
    """The padding of a frame is not data, and is not sent back."""
    where = serve(node, places, "balancer")
    request = segment(at(places.client, 50123), where, payload=b"x")
    came = node.ingress(bytes(request) + bytes(padding))
    assert came.packet[TCP].ack == 1002
    assert len(came.frame) == len(request) - 1


def quote_of(answer: Packet) -> bytes:
    """Return the fields of the packet that an ICMP error quotes."""
    return bytes(network(answer).payload)[8:]


@pytest.mark.parametrize("protocol", ["udp", "sctp"])
def test_other_packets_get_port_unreachable(
    node: PacketNode, places: Places, protocol: str
) -> None:
    """Other packets get "port unreachable" with a quote of the packet (RFC 792, RFC 4443 3.1)."""
    where = serve(node, places, "cluster", protocol)
    request = opening(protocol, at(places.client, 50123), where)
    answer = answered(node, request)
    asked = bytes(request)[ETHERNET:]
    if places.version == 4:
        assert (answer[ICMP].type, answer[ICMP].code) == (3, 3)
        assert asked.startswith(quote_of(answer)) and len(quote_of(answer)) >= 28
    else:
        kind, code, _sum, unused = struct.unpack_from("!BBHI", bytes(network(answer).payload))
        assert (kind, code, unused) == (1, 4, 0)
        assert asked.startswith(quote_of(answer)) and len(quote_of(answer)) >= 48


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 1400])
def test_datagrams_may_have_any_size(node: PacketNode, places: Places, size: int) -> None:
    """Datagrams may have any size, even no data."""
    where = serve(node, places, "cluster", "udp")
    request = opening("udp", at(places.client, 50123), where)
    request["UDP"].payload = type(request["Raw"])(bytes(size))
    for layer, field in ((network(request), "plen" if places.version == 6 else "len"),):
        delattr(layer, field)
    del request["UDP"].len, request["UDP"].chksum
    if places.version == 4:
        del network(request).chksum
    answer = answered(node, type(request)(bytes(request)))
    assert len(quote_of(answer)) >= (28 if places.version == 4 else 48)


def test_no_answer_to_reset(node: PacketNode, places: Places) -> None:
    """No reset answers a reset, or a segment that may belong to another connection."""
    where = serve(node, places, "balancer")
    for flags in ("R", "RA", "SR", "A", "SA", "FA"):
        request = segment(at(places.client, 50123), where, flags)
        assert node.ingress(request) == ("pass", bytes(request), {"passed": 1})


def test_endpoints_elsewhere(node: PacketNode, places: Places, protocol: str) -> None:
    """Under policy Local, a client gets no answer if endpoints are only on other nodes
    (kube-proxy.md 6.1).
    """
    there = [at(places.there, 8080)]
    for number, kind in enumerate(KINDS):
        where = serve(node, places, kind, protocol, "local", cluster=there)
        came = node.ingress(opening(protocol, at(places.client, 50_000 + number), where))
        assert (came.action, came.verdicts) == ("drop", {"no_local_endpoint": 1})
    assert node.maps["service_stats"].get(1)[3] == len(KINDS)


def test_refusals_beyond_the_limit_are_silent(
    node: PacketNode, places: Places, protocol: str
) -> None:
    """A refusal beyond the limit sends no answer until time has passed."""
    where = serve(node, places, "cluster", protocol)
    request = opening(protocol, at(places.client, 50123), where)
    assert {node.ingress(request).action for _ in range(10)} == {"redirect"}
    allow(node, 3, 0)
    assert [node.ingress(request).action for _ in range(3)] == ["redirect"] * 3
    limited = node.ingress(request)
    assert (limited.action, limited.verdicts["reject_limited"]) == ("drop", 1)
    budgets = node.maps["reject_budgets"]
    assert isinstance(budgets, Counters)
    budgets.zero([0])
    assert node.ingress(request).action == "redirect"
    assert host_of(where) == network(request).dst
