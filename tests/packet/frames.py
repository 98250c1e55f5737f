# SPDX-License-Identifier: Apache-2.0
"""Frames as they come in by a device. A place is written "10.1.0.1:80" or "[fd00::1]:80"."""

import logging
import struct
from collections.abc import Callable
from ipaddress import ip_address
from itertools import pairwise
from typing import Any

logging.getLogger("scapy.runtime").setLevel(logging.ERROR)

from scapy.layers.inet import ICMP, IP, TCP, UDP, fragment  # noqa: E402
from scapy.layers.inet6 import IPv6, IPv6ExtHdrFragment, fragment6  # noqa: E402
from scapy.layers.l2 import Ether  # noqa: E402
from scapy.layers.sctp import (  # noqa: E402
    SCTP,
    SCTPChunkAbort,
    SCTPChunkCookieEcho,
    SCTPChunkData,
    SCTPChunkHeartbeatReq,
    SCTPChunkInit,
    SCTPChunkInitAck,
    SCTPChunkShutdown,
    SCTPChunkShutdownComplete,
)
from scapy.packet import Packet, Raw  # noqa: E402

ROUTER, DEVICE = "02:00:00:00:00:fe", "02:00:00:00:00:01"
OTHER = "02:00:00:00:00:99"  # no device of this node
CHUNKS = {
    "init": SCTPChunkInit(init_tag=7, a_rwnd=65535, n_out_streams=1, n_in_streams=1, init_tsn=9),
    "init ack": SCTPChunkInitAck(init_tag=8, a_rwnd=65535, n_out_streams=1, n_in_streams=1),
    "cookie echo": SCTPChunkCookieEcho(cookie=b"taste"),
    "data": SCTPChunkData(data=b"question"),
    "heartbeat": SCTPChunkHeartbeatReq(),
    "shutdown": SCTPChunkShutdown(),
    "shutdown complete": SCTPChunkShutdownComplete(),
    "abort": SCTPChunkAbort(),
}
BACKEND_PORTS = 35_000
TEXT = bytes(range(256)) * 8  # of a datagram in fragments
TRANSPORTS = {"tcp": TCP, "udp": UDP, "sctp": SCTP}


def at(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(place: str) -> str:
    return place.rpartition(":")[0].strip("[]")


def port_of(place: str) -> int:
    return int(place.rpartition(":")[2])


def built(packet: Packet) -> Packet:
    """Return the packet with every length and checksum filled in, as if read from the wire."""
    for layer in packet.iterpayloads():
        layer.explicit = 1  # it means one packet: scapy need not copy it to find out
    return Ether(bytes(packet))


def stacked(*layers: Packet) -> Packet:
    """Return the layers stacked like by scapy's ``/``, which copies all its arguments each time."""
    for lower, upper in pairwise(layers):
        lower.lastlayer().add_payload(upper)
    return built(layers[0])


def carrier(source: str, destination: str, **fields: Any) -> Packet:
    """Return the Ethernet and IP headers of either family, between two addresses."""
    frame = Ether(src=ROUTER, dst=DEVICE)
    frame.add_payload((IPv6 if ":" in source else IP)(src=source, dst=destination, **fields))
    return frame


def segment(source: str, destination: str, flags: str = "S", **fields: Any) -> Packet:
    """Return a TCP segment; ``payload`` and the fields of its header may be given.

    The client's SYN has the number 1000, the backend's 5000 (``reply``).
    """
    payload = fields.pop("payload", b"")
    fields = {"seq": 1000 if "S" in flags else 1001, "ack": 5001 if "A" in flags else 0, **fields}
    header = TCP(sport=port_of(source), dport=port_of(destination), flags=flags, **fields)
    return stacked(carrier(host_of(source), host_of(destination)), header, Raw(payload))


def datagram(source: str, destination: str, payload: bytes = b"question", **fields: Any) -> Packet:
    header = UDP(sport=port_of(source), dport=port_of(destination), **fields)
    return stacked(carrier(host_of(source), host_of(destination)), header, Raw(payload))


def chunk(
    source: str, destination: str, kind: str = "init", tag: int | None = None, **fields: Any
) -> Packet:
    """Return an SCTP packet with one chunk and the tag of its receiver: 7 for clients, 8 for
    backends.

    Backends are recognized by their low port, like frontends.
    """
    receiver = 7 if port_of(destination) > BACKEND_PORTS else 8
    tag = tag if tag is not None else 0 if kind == "init" else receiver
    header = SCTP(sport=port_of(source), dport=port_of(destination), tag=tag)
    body = CHUNKS[kind].copy()
    for name, value in fields.items():
        setattr(body, name, value)
    return stacked(carrier(host_of(source), host_of(destination)), header, body)


def opening(protocol: str, source: str, destination: str) -> Packet:
    """Return the first packet of a flow."""
    makers: dict[str, Callable[[str, str], Packet]]
    makers = {"tcp": segment, "udp": datagram, "sctp": chunk}
    return makers[protocol](source, destination)


def next_packet(protocol: str, client: str, where: str) -> bytes:
    """Return a client's next packet in the middle of its flow."""
    if protocol == "tcp":
        return bytes(segment(client, where, "PA", payload=b"more"))
    if protocol == "sctp":
        return bytes(chunk(client, where, "data"))
    return bytes(datagram(client, where))


def to_another_host(packet: Packet, mac: str = OTHER) -> Packet:
    copy = packet.copy()
    copy.dst = mac
    return built(copy)


def network(packet: Packet) -> Packet:
    """Return the outermost IP header and its payload."""
    header: Packet = packet[IP] if IP in packet else packet[IPv6]
    return header


def transport(packet: Packet) -> Packet:
    found: Packet = next(packet[kind] for kind in TRANSPORTS.values() if kind in packet)
    return found


def source(packet: Packet) -> str:
    return at(network(packet).src, transport(packet).sport)


def destination(packet: Packet) -> str:
    return at(network(packet).dst, transport(packet).dport)


def ends(packet: Packet) -> str:
    """Return source and destination of a packet, as "10.1.0.1:5 > 10.2.0.1:80"."""
    return f"{source(packet)} > {destination(packet)}"


def reply(packet: Packet, flags: str = "SA") -> Packet:
    """Return the answer of the destination's host (for TCP: with these flags)."""
    here, there = destination(packet), source(packet)
    if TCP in packet:
        asked = packet[TCP]
        follows = asked.seq + len(asked.payload) + asked.flags.S + asked.flags.F
        return segment(here, there, flags, seq=5000 if "S" in flags else 5001, ack=follows)
    if UDP in packet:
        return datagram(here, there, b"answer")
    return chunk(here, there, "init ack")


def forwarded(packet: Packet) -> Packet:
    """Return the packet as the stack forwards it: one hop fewer, other hardware addresses."""
    copy = packet.copy()
    copy.src, copy.dst = DEVICE, ROUTER
    if IP in copy:
        copy[IP].ttl -= 1
        del copy[IP].chksum
    else:
        copy[IPv6].hlim -= 1
    return built(copy)


FRAGMENT = 44  # IPv6's header of that kind; it has 8 bytes


def quoted(error: Packet) -> str:
    """Return source and destination of the packet that an ICMP error quotes."""
    quote = bytes(network(error).payload)[8:]
    length, at_, size = ((quote[0] & 15) * 4, 12, 4) if quote[0] >> 4 == 4 else (40, 8, 16)
    if size == 16 and quote[6] == FRAGMENT:
        length += 8
    hosts = (str(ip_address(quote[n : n + size])) for n in (at_, at_ + size))
    ports = struct.unpack_from("!HH", quote, length)
    return " > ".join(at(host, port) for host, port in zip(hosts, ports, strict=True))


__all__ = ["ICMP", "IP", "SCTP", "TCP", "UDP", "Ether", "IPv6", "Packet", "Raw"]


def with_hops(packet: Packet, count: int) -> Packet:
    """Return the packet with this many hops left."""
    copy = packet.copy()
    if IP in copy:
        copy[IP].ttl = count
        del copy[IP].chksum
    else:
        network(copy).hlim = count
    return built(copy)


def fragments(source: str, destination: str, number: int = 7, size: int = 800) -> list[Packet]:
    """Return a datagram of 2048 bytes, in three fragments."""
    ports = UDP(sport=port_of(source), dport=port_of(destination))
    hosts = host_of(source), host_of(destination)
    if ":" in hosts[0]:
        header = IPv6ExtHdrFragment(id=number)
        whole = built(carrier(*hosts) / header / ports / Raw(TEXT))
        pieces = fragment6(whole[IPv6], size + 48)
        return [built(carrier(*hosts) / piece.payload) for piece in pieces]
    whole = built(carrier(*hosts, id=number) / ports / Raw(TEXT))
    return [built(type(whole)(src=whole.src, dst=whole.dst) / p) for p in fragment(whole[IP], size)]
