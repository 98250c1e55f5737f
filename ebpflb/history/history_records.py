# SPDX-License-Identifier: Apache-2.0
"""The records of a history file: JSON, one a line, bytes in base64.

A crash can leave half a line at the end, never one in the middle.

Keys and values are those of the maps, in their layout, joined. The entries at a time are those of
the last complete checkpoint, plus all writes since it began. A checkpoint is read while the agent
continues to write; those writes follow the checkpoint, so nothing is missed.
"""

import msgspec


class WriteCause(msgspec.Struct, frozen=True, omit_defaults=True):
    """An event of the cluster or the node, with the object's kind, name and resourceVersion."""

    event: str  # "added", "modified", "deleted", "listed", or another reason for a write
    kind: str = ""
    name: str = ""
    version: str = ""  # "" if the source has none, as manifests


class Begun(msgspec.Struct, frozen=True, tag="begun"):
    """A file begins.

    ``fresh``: it begins with an agent, or after a failed write, so its checkpoint does not continue
    the previous file. Otherwise the previous file was full.
    """

    at: float
    layout: str
    version: str
    fresh: bool


class Entries(msgspec.Struct, frozen=True, tag="entries"):
    """A part of the checkpoint: entries of a map, compressed by zlib."""

    map: str
    keys: bytes
    values: bytes


class Whole(msgspec.Struct, frozen=True, tag="whole"):
    """The checkpoint is complete."""

    at: float


class Write(msgspec.Struct, frozen=True):
    """Entries written to a map in one step; None as values: they were deleted."""

    map: str
    keys: bytes
    values: bytes | None


class Reset(msgspec.Struct, frozen=True):
    """Connections of a service port to a removed endpoint were reset."""

    service: str
    endpoint: str
    count: str  # the number, and the kind


class Sync(msgspec.Struct, frozen=True, omit_defaults=True, tag="sync"):
    """The writes of one sync, in this order; ``more`` causes are not named."""

    at: float  # seconds since the epoch, after the last write
    causes: list[WriteCause]
    more: int
    writes: list[Write]
    resets: list[Reset] = []  # never of a sync: they are in records of their own


Record = Begun | Entries | Whole | Sync

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def as_line(record: Record) -> bytes:
    return _encoder.encode(record) + b"\n"


def parse(line: bytes) -> Record:
    """Raise ValueError if the line is no record."""
    try:
        record: Record = _decoder.decode(line)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    return record
