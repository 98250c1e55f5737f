# SPDX-License-Identifier: Apache-2.0
"""Files that are this user's own: written in one step, read and held by nobody else."""

import fcntl
import logging
import os
import stat
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from ebpflb.errors import in_json_words, one_line

# Reads a file that others may have made: a regular one, and not more of it than is wanted.
#
# Opening a device or a pipe may block or, as a watchdog, act; so it is opened by O_PATH first,
# which does neither. A file in /proc is regular, and may still be endless or block.

log = logging.getLogger(__name__)

_CHECKOUT = Path(__file__).parents[1] / "docs"
# The documentation: beside the package in a checkout, else where setup.cfg's data_files puts it.
DOCS = (
    _CHECKOUT if (_CHECKOUT / "runbook.md").exists() else Path(sys.prefix) / "share/doc/ebpflb/docs"
)
Decoded = TypeVar("Decoded")

MAX_BYTES = 16 << 20  # as YAML this takes 20 s to read, in which no other file is read


class UnusableFile(Exception):
    """It is not regular, or too large; the message is for the operator."""


def read_regular(path: Path, most: int = MAX_BYTES) -> bytes:
    """Raises UnusableFile or OSError."""
    with open_regular(path, most) as file:
        data = _read(file.fileno(), most)
    if len(data) > most:
        raise UnusableFile(_too_large(most))
    return data


def open_regular(path: Path, most: int, *, follow: bool = True) -> IO[bytes]:
    """The open file, which is not larger than ``most`` now. Raises UnusableFile or OSError."""
    links = 0 if follow else os.O_NOFOLLOW
    found = os.open(path, os.O_PATH | os.O_CLOEXEC | links)
    try:
        status = os.fstat(found)
        if not stat.S_ISREG(status.st_mode):
            raise UnusableFile("not a regular file")
        if status.st_size > most:
            raise UnusableFile(_too_large(most))
        again = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(found)
    return open(again, "rb")


def decode_regular(path: Path, type: type[Decoded], most: int = MAX_BYTES) -> Decoded | None:
    """What a JSON file of an agent's says; None if there is none. One that says anything else is
    named in the log, and counts as none.
    """
    try:
        return msgspec.json.decode(read_regular(path, most), type=type)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = str(error.strerror)
    except (UnusableFile, ValueError) as error:
        reason = one_line(in_json_words(str(error)))
    except RecursionError:
        reason = "nested too deeply"
    log.warning("%s: ignored: %s", path, reason)
    return None


def _read(fd: int, most: int) -> bytes:
    """Up to one byte more than ``most``; the file may have grown, or have no size as in /proc."""
    parts, left = [], most + 1
    while left and (part := os.read(fd, left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _too_large(most: int) -> str:
    return f"larger than {most >> 20} MiB"


def replace(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Writes the file under a name of its own, which then takes the place of ``path``.

    Raises OSError of ``path``, which is as it was then.
    """
    name = ""
    try:
        half, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with open(half, "wb") as file:
            file.write(content)
            os.fchmod(half, mode)
        os.replace(name, path)
    except OSError as error:
        with suppress(OSError):  # none was made, or the file system is read-only now
            os.unlink(name)
        raise OSError(error.errno, error.strerror, str(path)) from error


def lock(opened: int) -> bool:
    """Locks a file or directory until it is closed; whether nobody else has locked it.

    Tries for a fifth of a second, because ``is_locked`` takes the lock for a moment.
    """
    for _ in range(20):
        with suppress(BlockingIOError):
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.01)
    return False


def is_locked(path: Path) -> bool:
    """Whether somebody has locked a file or directory; not if it cannot be opened."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(opened)
    return False
