# SPDX-License-Identifier: Apache-2.0
"""Reads a file that others may have made: a regular one, and not more of it than is wanted.

Opening a device or a pipe may block or, as a watchdog, act; so it is opened by O_PATH first, which
does neither. A file in /proc is regular, and may still be endless or block.
"""

import logging
import os
import stat
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from ebpflb.errors import in_json_words, one_line

log = logging.getLogger(__name__)

Decoded = TypeVar("Decoded")

MAX_BYTES = 16 << 20  # as YAML this takes 20 s to read, in which no other file is read


class UnusableFile(Exception):
    """It is not regular, or too large; the message is for the operator."""


def read(path: Path, most: int = MAX_BYTES) -> bytes:
    """Raises UnusableFile or OSError."""
    with opened(path, most) as file:
        data = _read(file.fileno(), most)
    if len(data) > most:
        raise UnusableFile(_too_large(most))
    return data


def opened(path: Path, most: int, *, follow: bool = True) -> IO[bytes]:
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


def decoded(path: Path, type: type[Decoded], most: int = MAX_BYTES) -> Decoded | None:
    """What a JSON file of an agent's says; None if there is none. One that says anything else is
    named in the log, and counts as none.
    """
    try:
        return msgspec.json.decode(read(path, most), type=type)
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
