# SPDX-License-Identifier: Apache-2.0
"""The files of one agent's history, numbered; the oldest are deleted beyond a number of bytes.

Nothing is synced to the disk: the history survives the agent, not the machine.
"""

import errno
import logging
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO

from ebpflb import files
from ebpflb.errors import NodeError, in_words, one_line
from ebpflb.history.history_records import MAGIC, Record, frame, unframed
from ebpflb.options import Paths

log = logging.getLogger(__name__)

LIMIT = 16 << 20  # bytes of all files together
PARTS = 4  # a file is full when this part of the limit follows its checkpoint
MOST_FILES = 64
_PRIVATE = 0o600
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_LARGEST = 1 << 30


class Segment:
    """The file that is appended to; every call raises OSError. A failed creation leaves no file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fd = os.open(path, _CREATE, _PRIVATE)
        self.size = 0
        try:
            self._append(MAGIC)
        except OSError:
            self.discard()
            raise

    def append(self, record: Record) -> None:
        self._append(frame(record))

    @property
    def is_deleted(self) -> bool:
        return os.fstat(self._fd).st_nlink == 0

    def close(self) -> None:
        os.close(self._fd)

    def discard(self) -> None:
        """Close and remove the file."""
        self.close()
        self.path.unlink(missing_ok=True)

    def _append(self, data: bytes) -> None:
        """Append data.

        After a partial write, on a full disk, the file is truncated: half a frame would hide later
        ones.
        """
        written = os.write(self._fd, data)
        if written < len(data):
            os.ftruncate(self._fd, self.size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self.size += written


def paths_of(paths: Paths) -> list[Path]:
    """Return the existing files, oldest first."""
    wanted = re.compile(re.escape(paths.name) + r"\.[0-9]{8}\.history")
    with suppress(OSError):
        return sorted(paths.run / name for name in os.listdir(paths.run) if wanted.fullmatch(name))
    return []


def new(paths: Paths, limit: int = LIMIT) -> Segment:
    """Create the next file; delete the oldest ones. Raises OSError."""
    found = paths_of(paths)
    number = int(found[-1].name.split(".")[-2]) + 1 if found else 1
    segment = Segment(paths.run / f"{paths.name}.{number % 10**8:08}.history")
    try:
        forget(paths, limit)
    except OSError:
        segment.discard()
        raise
    return segment


def forget(paths: Paths, limit: int = LIMIT) -> None:
    """Delete the oldest files beyond the limit; the last one stays."""
    found = paths_of(paths)
    sizes = [path.lstat().st_size for path in found]
    while len(found) > 1 and (sum(sizes) > limit or len(found) > MOST_FILES):
        found.pop(0).unlink()
        sizes.pop(0)


def set_aside(paths: Paths) -> None:
    """Log and rename files that are no history of ours."""
    for path in paths_of(paths):
        try:
            with _opened(path) as file:
                if file.read(len(MAGIC)) != MAGIC:
                    raise NodeError(f"{path}: not a history of ebpflb")
        except (NodeError, OSError) as error:
            aside = paths.run / f"{paths.name}.history.bad"
            with suppress(OSError):
                _move(path, aside)
            log.warning("%s: renamed to %s", one_line(in_words(error)), aside.name)


def read(path: Path) -> Iterator[Record]:
    """Yield the records, up to the first incomplete one. Raises NodeError."""
    try:
        with _opened(path) as file:
            data = file.read()
        yield from unframed(data)
    except OSError as error:
        raise NodeError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise NodeError(f"{path}: {error}") from None


def _opened(path: Path) -> IO[bytes]:
    """Open the file. Raises NodeError for a file that is not regular, and OSError."""
    try:
        return files.open_regular(path, _LARGEST, follow=False)
    except files.UnusableFile:
        raise NodeError(f"{path}: not a history of ebpflb") from None


def _move(path: Path, aside: Path) -> None:
    """Move the file, replacing an earlier one; an empty directory is deleted instead."""
    try:
        path.rename(aside)
    except (IsADirectoryError, NotADirectoryError):
        path.rmdir()
