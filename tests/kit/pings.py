# SPDX-License-Identifier: Apache-2.0
"""A program that sends one ping to an address and prints the first answer.

    python3 -IS pings.py ADDRESS SIZE SECONDS

Prints "answered FROM", "refused FROM" for an error "unreachable", "looped FROM" for an error "time
exceeded", or "silent".
"""

import os
import socket
import struct
import sys
import time
from pathlib import Path

PROGRAM = Path(__file__)
REQUEST, REPLY = {4: 8, 6: 128}, {4: 0, 6: 129}
ERRORS = {4: {3: "refused", 11: "looped"}, 6: {1: "refused", 3: "looped"}}
HEADER, QUOTED = {4: 20, 6: 0}, {4: 20, 6: 40}  # of IP, in what a raw socket gets, and in errors


def checksum(data: bytes) -> int:
    words: tuple[int, ...] = struct.unpack(f"!{(len(data) + 1) // 2}H", data + bytes(len(data) % 2))
    total = sum(words)
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def request(version: int, number: int, size: int) -> bytes:
    data = bytes(index % 256 for index in range(size))
    empty = struct.pack("!BBHHH", REQUEST[version], 0, 0, number, 1) + data
    return empty[:2] + struct.pack("!H", checksum(empty)) + empty[4:]


def answer(packet: bytes, version: int, sent: bytes) -> str:
    """Return the packet's answer to the request; "" if it is about another request."""
    message = packet[HEADER[version] :]
    kind, inner = message[0], message[8 + QUOTED[version] :]
    if kind == REPLY[version]:
        return "answered" if message[4:] == sent[4:] else ""
    word = ERRORS[version].get(kind, "")
    return word if inner[:1] + inner[4:8] == sent[:1] + sent[4:8] else ""


def ping(address: str, size: int, seconds: float) -> str:
    version = 6 if ":" in address else 4
    family = socket.AF_INET6 if version == 6 else socket.AF_INET
    number = socket.IPPROTO_ICMPV6 if version == 6 else socket.IPPROTO_ICMP
    sent, until = request(version, os.getpid() & 0xFFFF, size), time.monotonic() + seconds
    with socket.socket(family, socket.SOCK_RAW, number) as raw:
        raw.sendto(sent, (address, 0))
        while (left := until - time.monotonic()) > 0:
            raw.settimeout(left)
            try:
                packet, (sender, *_) = raw.recvfrom(65535)
            except TimeoutError:
                break
            if word := answer(packet, version, sent):
                return f"{word} {sender}"
    return "silent"


if __name__ == "__main__":
    print(ping(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
