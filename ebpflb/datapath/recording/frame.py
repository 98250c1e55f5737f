# SPDX-License-Identifier: Apache-2.0
"""Packets to be asked about: the first of a connection, and its reply. Their checksums are made up,
for programs update them by the difference.
"""

import struct
from ipaddress import ip_address

from ebpflb.model.services import Protocol
from ebpflb.plan.connections import Ends

_LINK, _IPV6, _IPV4 = 14, 0x86DD, 0x0800
_SUM, _HOPS = 0x1234, 64
_SYN, _ACK = 0x02, 0x10
_INIT, _INIT_ACK = 1, 2  # SCTP's chunks
_MACS = bytes.fromhex("ffffffffffff020000000002")  # to all: to another host's it would be foreign


def request(ends: Ends, protocol: Protocol) -> bytes:
    """The frame by which a connection or flow begins."""
    return _framed(ends, protocol, _transport(ends, protocol, _SYN, _INIT))


def reply(ends: Ends, protocol: Protocol) -> bytes:
    """The frame that answers one, with these ends."""
    return _framed(ends, protocol, _transport(ends, protocol, _SYN | _ACK, _INIT_ACK))


def ends_of(frame: bytes) -> Ends:
    """Of a frame as made here, and as a program has rewritten it."""
    is_v6 = frame[_LINK] >> 4 == 6
    size, at = (16, _LINK + 8) if is_v6 else (4, _LINK + 12)
    source, destination = frame[at : at + size], frame[at + size : at + 2 * size]
    ports = struct.unpack_from("!HH", frame, at + 2 * size)
    return Ends(ip_address(source), ip_address(destination), *ports)


def _transport(ends: Ends, protocol: Protocol, flags: int, chunk: int) -> bytes:
    ports = ends.source_port, ends.destination_port
    if protocol is Protocol.TCP:
        acknowledged = 1001 if flags & _ACK else 0
        return struct.pack("!HHIIBBHHH", *ports, 1000, acknowledged, 5 << 4, flags, 65535, _SUM, 0)
    if protocol is Protocol.UDP:
        return struct.pack("!HHHH", *ports, 16, _SUM) + bytes(8)
    init = struct.pack("!BBHIIHHI", chunk, 0, 20, 7, 65535, 1, 1, 9)
    tag = 0 if chunk == _INIT else 7
    return struct.pack("!HHII", *ports, tag, _SUM) + init


def _framed(ends: Ends, protocol: Protocol, transport: bytes) -> bytes:
    source, destination = ends.source.packed, ends.destination.packed
    if ends.source.version == 6:
        kind, size = _IPV6, len(transport)
        header = struct.pack("!IHBB", 6 << 28, size, int(protocol), _HOPS)
    else:
        kind, size = _IPV4, 20 + len(transport)
        header = struct.pack("!BBHHHBBH", 0x45, 0, size, 1, 0x4000, _HOPS, int(protocol), _SUM)
    return _MACS + struct.pack("!H", kind) + header + source + destination + transport
