# SPDX-License-Identifier: Apache-2.0
"""Segments in the name of one end of a connection to the other, by raw sockets.

They pass netfilter's OUTPUT and the device's egress. It takes CAP_NET_RAW; without it a client
notices with the next segment that it sends.
"""

import logging
import socket
import struct
from collections.abc import Iterable
from contextlib import ExitStack

from ebpflb.plan.connections import Ends

log = logging.getLogger(__name__)

_FAMILIES = {4: socket.AF_INET, 6: socket.AF_INET6}
_TCP, _HOPS, _SIZE = 6, 64, 20
_SYN_ACK, _RST_ACK = 0x12, 0x14
_V4 = struct.Struct(">BBHHHBBH4s4s")
_V6 = struct.Struct(">IHBB16s16s")
_SEGMENT = struct.Struct(">HHIIBBHHH")


def reset(ends: Ends, sequence: int, acknowledgment: int) -> bytes:
    """An IP packet. ``sequence``: what the receiver awaits; ``acknowledgment``: what it has sent,
    which counts if it is still connecting.
    """
    return _packet(ends, _RST_ACK, sequence, acknowledgment)


def question(ends: Ends) -> bytes:
    """An IP packet that is answered by an acknowledgment with the right numbers.

    Not by a SYN: conntrack takes a SYN-ACK of a connection that it does not know for invalid, and
    makes no entry.
    """
    return _packet(ends, _SYN_ACK, 0, 0)


class Sender:
    """Raw sockets that are open until the end of the ``with`` block."""

    may_send = True  # false once the capability was missing: that is logged once

    def __enter__(self) -> "Sender":
        self._stack = ExitStack()
        self._raw: dict[int, socket.socket] = {}
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def send(self, ends: Ends, packets: Iterable[bytes]) -> None:
        """What cannot be sent, as no route leads there, is left out."""
        for packet in packets:
            try:
                raw = self._socket(ends.destination.version)
                if raw:
                    raw.sendto(packet, (str(ends.destination), 0))
            except OSError as error:
                log.debug("no segment to %s: %s", ends.destination, error.strerror)

    def _socket(self, version: int) -> socket.socket | None:
        if version not in self._raw and self.may_send:
            try:
                raw = socket.socket(_FAMILIES[version], socket.SOCK_RAW, socket.IPPROTO_RAW)
            except PermissionError:
                type(self).may_send = False
                log.warning("CAP_NET_RAW is missing: silent clients of packets are not reset")
            else:
                self._raw[version] = self._stack.enter_context(raw)
        return self._raw.get(version)


def _packet(ends: Ends, flags: int, sequence: int, acknowledgment: int) -> bytes:
    ports = ends.source_port, ends.destination_port
    numbers = *ports, sequence, acknowledgment, _SIZE // 4 << 4, flags, 0
    source, destination = ends.source.packed, ends.destination.packed
    pseudo = source + destination + struct.pack(">II", _SIZE, _TCP)
    checksum = _checksum(pseudo + _SEGMENT.pack(*numbers, 0, 0))
    segment = _SEGMENT.pack(*numbers, checksum, 0)
    if ends.destination.version == 6:
        return _V6.pack(6 << 28, _SIZE, _TCP, _HOPS, source, destination) + segment
    whole = _V4.size + _SIZE  # the kernel writes the header's checksum
    header = _V4.pack(0x45, 0, whole, 0, 0x4000, _HOPS, _TCP, 0, source, destination)
    return header + segment


def _checksum(data: bytes) -> int:
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
