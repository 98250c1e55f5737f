# SPDX-License-Identifier: Apache-2.0
"""ICMP and ICMPv6 errors as routers and hosts make them."""

from scapy.layers.inet import IPOption_NOP
from scapy.layers.inet6 import (
    ICMPv6DestUnreach,
    ICMPv6ND_Redirect,
    ICMPv6NDOptDstLLAddr,
    ICMPv6NDOptRedirectedHdr,
    ICMPv6PacketTooBig,
    ICMPv6TimeExceeded,
)

from tests.packet.frames import ICMP, IP, Packet, Raw, built, carrier, network

NOP = IPOption_NOP()
QUERIES = {4: (0, 8, 13, 14), 6: (128, 129, 133, 135, 136)}
PROTOCOL = {4: {"proto": 1}, 6: {"nh": 58}}
KINDS = {
    "too big": (ICMP(type=3, code=4, nexthopmtu=1280), ICMPv6PacketTooBig(mtu=1280)),
    "too late": (ICMP(type=11, code=0), ICMPv6TimeExceeded(code=0)),
    "no route": (ICMP(type=3, code=1), ICMPv6DestUnreach(code=0)),
    "unreachable": (ICMP(type=3, code=3), ICMPv6DestUnreach(code=4)),
}


def error(
    kind: str, sender: str, packet: Packet, *, size: int | None = None, to: str = ""
) -> Packet:
    """Return ``sender``'s ICMP error about a packet, with ``size`` bytes after its IP header."""
    whole = network(packet)
    header = whole.ihl * 4 if IP in packet else 40
    quote = bytes(whole) if size is None else bytes(whole)[: header + size]
    message = KINDS[kind][0 if IP in packet else 1]
    return built(carrier(sender, to or whole.src) / message / Raw(quote))


def redirect(sender: str, packet: Packet, *, with_link_address: bool = False) -> Packet:
    """Return the redirect that sends the packet's sender directly to its receiver."""
    whole, after = network(packet), carrier(sender, network(packet).src)
    if IP in packet:
        return built(after / ICMP(type=5, code=1, gw=whole.dst) / Raw(bytes(whole)))
    message = after / ICMPv6ND_Redirect(tgt=whole.dst, dst=whole.dst)
    if with_link_address:
        message /= ICMPv6NDOptDstLLAddr(lladdr="02:00:00:00:00:02")
    return built(message / ICMPv6NDOptRedirectedHdr(pkt=bytes(whole)))


def about(message: Packet) -> bytes:
    """Return type, code and the other fields before the quoted packet (not the checksum)."""
    head = bytes(network(message).payload)[:8]
    return head[:2] + head[4:]
