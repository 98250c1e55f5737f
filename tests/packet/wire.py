# SPDX-License-Identifier: Apache-2.0
"""Frames read byte by byte, without scapy: checksums, and the fields that translation may change.

A malformed frame reads as None: its checksums are unknown.
"""

import struct
from typing import NamedTuple

from scapy.layers.sctp import crc32c
from scapy.utils import checksum

ETHERNET = 14
ICMP, TCP, UDP, ICMPV6, SCTP = 1, 6, 17, 58, 132
HOP, ROUTING, FRAGMENT, OPTIONS = 0, 43, 44, 60
_CHECKSUM_AT = {ICMP: 2, TCP: 16, UDP: 6, ICMPV6: 2, SCTP: 8}
_ERRORS = {ICMP: (3, 4, 5, 11, 12), ICMPV6: (1, 2, 3, 4)}


class Wire(NamedTuple):
    """The offsets of an IP packet's parts; ``whole`` if it is neither cut nor a fragment."""

    start: int
    version: int
    protocol: int
    payload: int
    end: int
    first: bool
    whole: bool


def read(raw: bytes, start: int = ETHERNET) -> Wire | None:
    """Return the IP packet at ``start`` of a frame."""
    kind = raw[12:14] if start == ETHERNET else {4: b"\x08\0", 6: b"\x86\xdd"}.get(raw[start] >> 4)
    if kind == b"\x08\0" and len(raw) >= start + 20 and raw[start] >> 4 == 4:
        return _read_v4(raw, start)
    if kind == b"\x86\xdd" and len(raw) >= start + 40 and raw[start] >> 4 == 6:
        return _read_v6(raw, start)
    return None


def _read_v4(raw: bytes, start: int) -> Wire | None:
    length, offset = struct.unpack_from("!H2xH", raw, start + 2)
    header = (raw[start] & 15) * 4
    length = length if start == ETHERNET else len(raw)  # a quote is cut, and may lie
    if header < 20 or length < header or len(raw) < start + header:
        return None
    whole = not offset & 0x3FFF and start + length <= len(raw)
    at, end = start + header, min(start + length, len(raw))
    return Wire(start, 4, raw[start + 9], at, end, not offset & 0x1FFF, whole)


def _read_v6(raw: bytes, start: int) -> Wire | None:
    following, at, first = raw[start + 6], start + 40, True
    end = at + struct.unpack_from("!H", raw, start + 4)[0]
    whole = end <= len(raw)
    while following in (HOP, ROUTING, FRAGMENT, OPTIONS) and at + 8 <= len(raw):
        if following == FRAGMENT:
            offset = struct.unpack_from("!H", raw, at + 2)[0]
            first, whole = not offset & 0xFFF8, whole and not offset & 0xFFF9
        step = 8 if following == FRAGMENT else 8 + 8 * raw[at + 1]
        following, at = raw[at], at + step
        if not first:
            break
    return Wire(start, 6, following, at, min(end, len(raw)), first, whole)


def faults(raw: bytes, start: int = ETHERNET) -> set[str]:
    """Return the wrong checksums. Of a quoted packet only the header's checksum is checked (RFC
    5508 4).
    """
    wire = read(raw, start)
    if wire is None:
        return set()
    layer = "quoted " if start > ETHERNET else ""
    found = set()
    if wire.version == 4 and checksum(raw[start : wire.payload]):
        found.add(f"{layer}IPv4 header")
    if not layer and wire.whole and wire.payload < wire.end and not _sums_up(raw, wire):
        found.add(f"protocol {wire.protocol}")
    return found | (faults(raw, wire.payload + 8) if quotes(raw, wire) else set())


def quotes(raw: bytes, wire: Wire) -> bool:
    """Whether the packet is an ICMP error with room for the quoted packet."""
    kinds = _ERRORS.get(wire.protocol, ())
    return wire.first and wire.end > wire.payload + 8 and raw[wire.payload] in kinds


def _sums_up(raw: bytes, wire: Wire) -> bool:
    data = raw[wire.payload : wire.end]
    if wire.protocol == SCTP and len(data) >= 12:
        blank = data[:8] + bytes(4) + data[12:]
        return bool(crc32c(blank) == struct.unpack("<I", data[8:12])[0])
    if wire.protocol == UDP and data[6:8] == b"\0\0":
        return wire.version == 4
    if wire.protocol == ICMP:
        return checksum(data) == 0
    if wire.protocol in (TCP, UDP, ICMPV6):
        return checksum(_pseudo(raw, wire, len(data)) + data) == 0
    return True


def _pseudo(raw: bytes, wire: Wire, length: int) -> bytes:
    if wire.version == 4:
        addresses = raw[wire.start + 12 : wire.start + 20]
    else:
        addresses = raw[wire.start + 8 : wire.start + 40]
    return addresses + struct.pack("!II", length, wire.protocol)


def without_priority(raw: bytes) -> bytes:
    """Return the frame as the kernel receives it: without a tag of id 0, and without the tag after
    it.
    """
    if not _is_tagged(raw) or int.from_bytes(raw[14:16], "big") & 0xFFF:
        return raw
    popped = raw[:12] + raw[16:]
    return popped[:12] + popped[16:] if _is_tagged(popped) else popped


def _is_tagged(raw: bytes) -> bool:
    return raw[12:14] in (b"\x81\x00", b"\x88\xa8") and len(raw) >= ETHERNET + 4


def untouchable(raw: bytes, start: int = ETHERNET) -> bytes:
    """Return the frame without the addresses, ports and checksums, which translation may change."""
    wire = read(raw, start)
    if wire is None:
        return raw
    blank = bytearray(raw)
    if wire.version == 4:
        _wipe(blank, start + 10, 10)
    else:
        _wipe(blank, start + 8, 32)
    if wire.first and wire.protocol in (TCP, UDP, SCTP):
        _wipe(blank, wire.payload, 4)
    if wire.first and wire.protocol in _CHECKSUM_AT:
        _wipe(blank, wire.payload + _CHECKSUM_AT[wire.protocol], 4 if wire.protocol == SCTP else 2)
    return untouchable(bytes(blank), wire.payload + 8) if quotes(raw, wire) else bytes(blank)


def _wipe(raw: bytearray, start: int, size: int) -> None:
    for at in range(start, min(start + size, len(raw))):
        raw[at] = 0
