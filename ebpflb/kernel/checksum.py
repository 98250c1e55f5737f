# SPDX-License-Identifier: Apache-2.0
"""The checksum of IP, TCP, UDP and ICMP (RFC 1071), for packets that are made here."""

import struct


def internet_checksum(data: bytes) -> int:
    """Return the checksum; an odd last byte counts as if a zero followed."""
    total: int = sum(struct.unpack(f"!{(len(data) + 1) // 2}H", data + bytes(len(data) % 2)))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF
