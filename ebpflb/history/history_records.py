# SPDX-License-Identifier: Apache-2.0
"""The records of a history file, and their bytes.

A file begins with MAGIC. Each record is a frame: its length, its CRC-32, and the record in msgpack.
A crash can leave half a frame at the end, never one in the middle.

Keys and values are those of the maps, in their layout, joined. The entries at a time are those of
the last complete checkpoint, plus all writes since it began. A checkpoint is read while the agent
continues to write; those writes follow the checkpoint, so nothing is missed.
"""

from collections.abc import Iterator
from struct import Struct
from zlib import crc32

import msgspec

MAGIC = b"ebpflb-history-1\n"
_MOST_BYTES = 1 << 28  # of a frame: a longer one is damaged

_head = Struct("<II")


class WriteCause(msgspec.Struct, frozen=True, array_like=True):
    """An event of the cluster or the node, with the object's kind, name and resourceVersion."""

    event: str  # "added", "modified", "deleted", "listed", or another reason for a write
    kind: str = ""
    name: str = ""
    version: str = ""  # "" if the source has none, as manifests


class Begun(msgspec.Struct, frozen=True, array_like=True, tag="begun"):
    """A file begins.

    ``anew``: with an agent, or after a failed write; the previous file's content does not lead to
    this checkpoint. Otherwise the previous file is full.
    """

    at: float
    layout: str
    version: str
    anew: bool


class Entries(msgspec.Struct, frozen=True, array_like=True, tag="entries"):
    """A part of the checkpoint: entries of a map, compressed by zlib."""

    map: str
    keys: bytes
    values: bytes


class Whole(msgspec.Struct, frozen=True, array_like=True, tag="whole"):
    """The checkpoint is complete."""

    at: float


class Write(msgspec.Struct, frozen=True, array_like=True):
    """Entries written to a map in one step; None as values: they were deleted."""

    map: str
    keys: bytes
    values: bytes | None


class Reset(msgspec.Struct, frozen=True, array_like=True):
    """Connections of a service port to a removed endpoint were reset."""

    service: str
    endpoint: str
    count: str  # the number, and the kind


class Sync(msgspec.Struct, frozen=True, array_like=True, tag="sync"):
    """The writes of one sync, in this order; ``more`` causes are not named."""

    at: float  # seconds since the epoch, after the last write
    causes: list[WriteCause]
    more: int
    writes: list[Write]
    resets: list[Reset] = []  # never of a sync: they are in records of their own


Record = Begun | Entries | Whole | Sync

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def frame(record: Record) -> bytes:
    """Return the record's bytes in a file."""
    body = _encoder.encode(record)
    return _head.pack(len(body), crc32(body)) + body


def unframed(data: bytes) -> Iterator[Record]:
    """Yield the records of a file, up to the first incomplete one.

    Raises ValueError if it is no history.
    """
    if not data.startswith(MAGIC):
        raise ValueError("not a history of ebpflb")
    view, at = memoryview(data), len(MAGIC)
    while at + _head.size <= len(data):
        length, checksum = _head.unpack_from(data, at)
        body = view[at + _head.size : at + _head.size + length]
        if length > _MOST_BYTES or len(body) < length or crc32(body) != checksum:
            return
        try:
            yield _decoder.decode(body)
        except (ValueError, RecursionError):
            return
        at += _head.size + length
