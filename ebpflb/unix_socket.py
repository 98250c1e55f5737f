# SPDX-License-Identifier: Apache-2.0
"""Sockets in a directory: an address holds 107 bytes, but a directory's path may be longer.

So the directory is opened, and the socket is addressed through that descriptor.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from struct import pack

_PRIVATE = 0o600
_BACKLOG = 128


def listen(path: Path) -> socket.socket:
    """Return a listening socket for this user only. It replaces the socket of an earlier process.

    Raises OSError.
    """
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(opened.fileno(), _PRIVATE)  # before bind(2): the file is never another's
        with _address(path) as address:
            path.unlink(missing_ok=True)
            opened.bind(address)
        opened.listen(_BACKLOG)
    except OSError:
        opened.close()
        raise
    return opened


def connect(path: Path, seconds: float) -> socket.socket:
    """Return a connection whose calls last at most ``seconds``. Raises OSError."""
    opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # While the backlog is full connect(2) waits, and only if the socket is a blocking one.
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, pack("ll", int(seconds), 0))
        with _address(path) as address:
            opened.connect(address)
        opened.settimeout(seconds)
    except OSError:
        opened.close()
        raise
    return opened


@contextmanager
def _address(path: Path) -> Iterator[str]:
    directory = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
