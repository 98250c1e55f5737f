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
from ebpflb.history.history_records import Begun, Record, as_line, parse
from ebpflb.options import Paths

log = logging.getLogger(__name__)

LIMIT = 16 << 20  # bytes of all files together
PARTS = 4  # a file is full when this part of the limit follows its checkpoint
MOST_FILES = 64
_PRIVATE = 0o600
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
_LARGEST = 1 << 30
_LONGEST_FIRST = 1 << 16  # bytes of a file's first line


class Segment:
    """The file that is appended to; every call raises OSError. A failed creation leaves no file."""

    def __init__(self, path: Path, begun: Begun) -> None:
        self.path = path
        self._fd = os.open(path, _CREATE, _PRIVATE)
        self.size = 0
        try:
            self.append(begun)
        except OSError:
            self.discard()
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

    def discard(self) -> None:
        """Close and remove the file."""
        self.close()
        self.path.unlink(missing_ok=True)


def paths_of(paths: Paths) -> list[Path]:
    """Return the existing files, oldest first."""
    wanted = re.compile(re.escape(paths.name) + r"\.[0-9]{8}\.history")
    with suppress(OSError):
        return sorted(paths.run / name for name in os.listdir(paths.run) if wanted.fullmatch(name))
    return []


def new(paths: Paths, begun: Begun, limit: int = LIMIT) -> Segment:
    """Create the next file with its first record; delete the oldest ones. Raises OSError."""
    found = paths_of(paths)
    number = int(found[-1].name.split(".")[-2]) + 1 if found else 1
    segment = Segment(paths.run / f"{paths.name}.{number % 10**8:08}.history", begun)
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
                _begun(path, file)
        except (NodeError, OSError) as error:
            aside = paths.run / f"{paths.name}.history.bad"
            with suppress(OSError):
                _move(path, aside)
            log.warning("%s: renamed to %s", one_line(in_words(error)), aside.name)


def read(path: Path) -> Iterator[Record]:
    """Yield the records; of the last line, half may be written. Raises NodeError."""
    try:
        with _opened(path) as file:
            yield _begun(path, file)
            for number, line in enumerate(file, 2):
                if not line.endswith(b"\n"):
                    return
                yield _parsed(path, number, line)
    except OSError as error:
        raise NodeError(f"{path}: {error.strerror}") from error


def _begun(path: Path, file: IO[bytes]) -> Begun:
    """Return the first record. Raises NodeError if the file is no history."""
    with suppress(ValueError):
        begun = parse(file.readline(_LONGEST_FIRST))
        if isinstance(begun, Begun):
            return begun
    raise NodeError(f"{path}: not a history of ebpflb")


def _parsed(path: Path, number: int, line: bytes) -> Record:
    try:
        return parse(line)
    except ValueError as error:
        raise NodeError(f"{path}: line {number} is damaged ({one_line(str(error))})") from None


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
