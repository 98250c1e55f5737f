# SPDX-License-Identifier: Apache-2.0
"""Attributes of netlink messages: bytes to contents by kind, and back."""

import struct

ATTRIBUTE = struct.Struct("=HH")  # struct nlattr
_TYPE = 0x3FFF  # NLA_TYPE_MASK


def attributes(data: bytes, at: int = 0, end: int | None = None) -> dict[int, bytes]:
    """Kind -> content, of those that begin and end in some data."""
    found, end = {}, len(data) if end is None else end
    while at < end:
        length, kind = ATTRIBUTE.unpack_from(data, at)
        found[kind & _TYPE] = data[at + ATTRIBUTE.size : at + length]
        at += aligned(length)
    return found


def attribute(kind: int, content: bytes) -> bytes:
    """One as it is sent."""
    length = ATTRIBUTE.size + len(content)
    return (ATTRIBUTE.pack(length, kind) + content).ljust(aligned(length), b"\0")


def aligned(length: int) -> int:
    """Where the next one begins."""
    return (length + 3) & ~3
