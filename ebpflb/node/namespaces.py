# SPDX-License-Identifier: Apache-2.0
"""The network namespaces of this node, and doing something in each of them.

They are found at the processes that are in them and at the names that container runtimes give
them; those that have neither stay hidden. Entering another one takes CAP_SYS_ADMIN, and seeing
those of other users' processes CAP_SYS_PTRACE; names need only the first.
"""

import errno
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from cffi import FFI

log = logging.getLogger(__name__)

_ffi = FFI()
_ffi.cdef("int setns(int fd, int kind);")
_libc = _ffi.dlopen(None)

PROCESSES = Path("/proc")
OWN = Path("/proc/thread-self/ns/net")
NAMED = tuple(map(Path, ("/run/netns", "/var/run/netns", "/run/docker/netns")))
_NETWORK = 0x40000000  # CLONE_NEWNET

T = TypeVar("T")


class Namespaces:
    """All that can be found; says once if it may not enter them."""

    def __init__(self) -> None:
        self._confined = False

    def each(self, what: Callable[[], T]) -> Iterator[tuple[bool, T]]:
        """What ``what`` returns in each, our own first; whether it is our own.

        Those that cannot be entered, because they have vanished or belong to others, are left out.
        """
        yield True, what()
        for path in others():
            try:
                found = _visit(path, what)
            except OSError as error:
                self._say(error)
            else:
                yield False, found

    def _say(self, error: OSError) -> None:
        if error.errno in (errno.EPERM, errno.EACCES) and not self._confined:
            self._confined = True
            log.warning("pods' network namespaces are closed to us: CAP_SYS_ADMIN is missing")


def _visit(path: Path, what: Callable[[], T]) -> T:
    """In a thread that ends in the other namespace, so that nobody who goes on is there."""

    def stay() -> T:
        _enter(path)
        return what()

    with ThreadPoolExecutor(1, "visit") as thread:
        return thread.submit(stay).result()


def _enter(path: Path) -> None:
    namespace = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _libc.setns(namespace, _NETWORK):
            raise OSError(_ffi.errno, os.strerror(_ffi.errno), str(path))
    finally:
        os.close(namespace)


def others() -> Iterator[Path]:
    """Each namespace that can be found once, without our own."""
    seen = {_identity(OWN)}
    for path in _paths():
        identity = _identity(path)
        if identity and identity not in seen:
            seen.add(identity)
            yield path


def _paths() -> Iterator[Path]:
    """The names first: they last longer than processes, and anyone may read them."""
    for folder in NAMED:
        yield from sorted(folder.iterdir()) if folder.is_dir() else ()
    for entry in os.scandir(PROCESSES):
        if entry.name.isdigit():
            yield Path(entry.path) / "ns/net"


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino
