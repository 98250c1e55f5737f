# SPDX-License-Identifier: Apache-2.0
"""Frames that belong to a flow that a real client has opened: a datagram, or a segment that only
acknowledges, with the numbers that the client's next one would have.

They differ from the client's own by their DSCP, by which the other end drops them.
"""

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address

from ebpflb.kernel.segment import checksum

DSCP = 1
_TIMEOUT = 5.0  # seconds
_REPAIR, _QUEUE, _SEQUENCE = 19, 20, 21  # TCP_REPAIR, TCP_REPAIR_QUEUE, TCP_QUEUE_SEQ
_RECEIVED, _SENT, _NO_PROBE = 1, 2, -1
_RESET = struct.pack("ii", 1, 0)
_ACK, _WORDS = 0x10, 5 << 4
_UDP, _TCP = socket.IPPROTO_UDP, socket.IPPROTO_TCP
KINDS = {"UDP": socket.SOCK_DGRAM, "TCP": socket.SOCK_STREAM}


@contextmanager
def opened(client: socket.socket, where: tuple[str, int]) -> Iterator[bytes]:
    """Open a flow, answered once, then silent; return its packet after the link header."""
    with client:
        client.settimeout(_TIMEOUT)
        client.connect(where)
        client.send(b"?")
        client.recv(1)
        own, peer = client.getsockname(), client.getpeername()
        if client.type == socket.SOCK_STREAM:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            sent, received = _numbers(client)
            rest = struct.pack("!IIBBHHH", sent, received, _WORDS, _ACK, 512, 0, 0)
            yield _packet(_TCP, own, peer, rest, 16)
        else:
            yield _packet(_UDP, own, peer, struct.pack("!HHB", 9, 0, 0), 6)


def _numbers(stream: socket.socket) -> tuple[int, int]:
    """Return the next sequence numbers, sent and received."""
    stream.setsockopt(_TCP, _REPAIR, 1)
    found = []
    for queue in (_SENT, _RECEIVED):
        stream.setsockopt(_TCP, _QUEUE, queue)
        found.append(stream.getsockopt(_TCP, _SEQUENCE) & 0xFFFFFFFF)
    stream.setsockopt(_TCP, _REPAIR, _NO_PROBE)
    return found[0], found[1]


def _packet(
    protocol: int, own: tuple[str, int], peer: tuple[str, int], rest: bytes, sum_at: int
) -> bytes:
    """Return IPv4 and transport header; ``sum_at``: where the checksum is."""
    ends = ip_address(own[0]).packed + ip_address(peer[0]).packed
    inner = struct.pack("!HH", own[1], peer[1]) + rest
    pseudo = ends + struct.pack("!HH", protocol, len(inner))
    inner = _with_sum(inner, sum_at, checksum(pseudo + inner))
    header = struct.pack(
        "!BBHHHBBH8s", 0x45, DSCP << 2, 20 + len(inner), 1, 0, 64, protocol, 0, ends
    )
    return _with_sum(header, 10, checksum(header)) + inner


def _with_sum(header: bytes, at: int, checksum: int) -> bytes:
    return header[:at] + struct.pack("!H", checksum) + header[at + 2 :]
