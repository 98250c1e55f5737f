# SPDX-License-Identifier: Apache-2.0
"""The files of one agent's history, numbered; the oldest are deleted beyond a number of bytes.

Nothing is synced to the disk: the history survives the agent, not the machine.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from ebpflb import files
from ebpflb.errors import NodeError, one_line
from ebpflb.options import Paths

# The records of a history file: JSON, one a line, bytes in base64.
#
# A crash can leave half a line at the end, never one in the middle.
#
# Keys and values are those of the maps, in their layout, joined. The entries at a time are those of
# the last complete checkpoint, plus all writes since it began. A checkpoint is read while the agent
# continues to write; those writes follow the checkpoint, so nothing is missed.


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


LIMIT = 16 << 20  # bytes of all files together
PARTS = 4  # a file is full when this part of the limit follows its checkpoint
MOST_FILES = 64
_PRIVATE = 0o600
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_LARGEST = 1 << 30


class Segment:
    """The file that is appended to; every call raises OSError. A failed creation leaves no file."""

    def __init__(self, path: Path, begun: Begun) -> None:
        self.path = path
        self._fd = os.open(path, _CREATE, _PRIVATE)
        self.size = 0
        try:
            self.append(begun)
        except OSError:
            self.close()
            self.path.unlink(missing_ok=True)
            raise

    def append(self, record: Record) -> None:
        """Append a record.

        After a partial write, on a full disk, the file is truncated: half a line would hide later
        ones.
        """
        line = as_line(record)
        written = os.write(self._fd, line)
        if written < len(line):
            os.ftruncate(self._fd, self.size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self.size += written

    @property
    def is_deleted(self) -> bool:
        return os.fstat(self._fd).st_nlink == 0

    def close(self) -> None:
        os.close(self._fd)


def paths_of(paths: Paths) -> list[Path]:
    """Return the existing files, oldest first."""
    wanted = re.compile(re.escape(paths.name) + r"\.[0-9]{8}\.history")
    with suppress(OSError):
        return sorted(paths.run / name for name in os.listdir(paths.run) if wanted.fullmatch(name))
    return []


def new(paths: Paths, begun: Begun, limit: int = LIMIT) -> Segment:
    """Delete the oldest files, and create the next one with its first record. Raises OSError."""
    forget(paths, limit)
    found = paths_of(paths)
    number = int(found[-1].name.split(".")[-2]) + 1 if found else 1
    return Segment(paths.run / f"{paths.name}.{number % 10**8:08}.history", begun)


def forget(paths: Paths, limit: int = LIMIT) -> None:
    """Delete the oldest files beyond the limit; the last one stays."""
    found = paths_of(paths)
    sizes = [path.lstat().st_size for path in found]
    while len(found) > 1 and (sum(sizes) > limit or len(found) > MOST_FILES):
        found.pop(0).unlink()
        sizes.pop(0)


def read(path: Path) -> Iterator[Record]:
    """Yield the records; of the last line, half may be written. Raises NodeError."""
    number = 1
    try:
        with files.open_regular(path, _LARGEST, follow=False) as file:
            for number, line in enumerate(file, 1):
                if number > 1 and not line.endswith(b"\n"):
                    return
                yield parse(line)
    except OSError as error:
        raise NodeError(f"{path}: {error.strerror}") from error
    except (files.UnusableFile, ValueError) as error:
        reason = one_line(str(error))
        raise NodeError(f"{path}: line {number} is damaged ({reason})") from None
