# SPDX-License-Identifier: Apache-2.0
"""Attributes of netlink messages: bytes to contents by kind, and back."""

import struct
from collections.abc import Iterator

ATTRIBUTE = struct.Struct("=HH")  # struct nlattr
NESTED = 0x8000  # NLA_F_NESTED
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


def nested(kind: int, *contents: bytes) -> bytes:
    """An attribute of attributes."""
    return attribute(kind | NESTED, b"".join(contents))


def text(kind: int, content: str) -> bytes:
    return attribute(kind, to_text(content))


def number(kind: int, content: int) -> bytes:
    return attribute(kind, to_number(content))


def to_text(content: str) -> bytes:
    return content.encode() + b"\0"


def to_number(content: int) -> bytes:
    """In network order, as nf_tables has numbers."""
    return struct.pack(">I", content & 0xFFFFFFFF)


def each(data: bytes) -> Iterator[bytes]:
    """The contents of a list's attributes, which are all of one kind."""
    at = 0
    while at < len(data):
        length, _ = ATTRIBUTE.unpack_from(data, at)
        yield data[at + ATTRIBUTE.size : at + length]
        at += aligned(length)


def aligned(length: int) -> int:
    """Where the next one begins."""
    return (length + 3) & ~3
