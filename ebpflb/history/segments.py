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

from ebpflb import files
from ebpflb.errors import NodeError, one_line
from ebpflb.history.history_records import Begun, Record, as_line, parse
from ebpflb.options import Paths

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
