# SPDX-License-Identifier: Apache-2.0
"""Reads a file that others may have made: a regular one, and not more of it than is wanted.

Opening a device or a pipe may block or, as a watchdog, act; so it is opened by O_PATH first, which
does neither. A file in /proc is regular, and may still be endless or block.
"""

import os
import stat
from pathlib import Path

MAX_BYTES = 16 << 20  # as YAML this takes 20 s to read, in which no other file is read


class UnusableFile(Exception):
    """It is not regular, or too large; the message is for the operator."""


def read(path: Path, most: int = MAX_BYTES) -> bytes:
    """Raises UnusableFile or OSError."""
    found = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        status = os.fstat(found)
        if not stat.S_ISREG(status.st_mode):
            raise UnusableFile("not a regular file")
        if status.st_size > most:
            raise UnusableFile(_too_large(most))
        opened = os.open(f"/proc/self/fd/{found}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    finally:
        os.close(found)
    with open(opened, "rb", buffering=0) as file:
        data = _read(file.fileno(), most)
    if len(data) > most:
        raise UnusableFile(_too_large(most))
    return data


def _read(fd: int, most: int) -> bytes:
    """Up to one byte more than ``most``; the file may have grown, or have no size as in /proc."""
    parts, left = [], most + 1
    while left and (part := os.read(fd, left)):
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _too_large(most: int) -> str:
    return f"larger than {most >> 20} MiB"
