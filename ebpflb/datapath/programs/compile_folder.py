# SPDX-License-Identifier: Apache-2.0
"""The folder in which one compilation finds its sources, and those that a kill has left.

A folder in use is locked; the kernel ends the lock with its process. So a folder of this user's
that nobody has locked is left over, and the next start removes it.
"""

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX = "ebpflb-compile-"


@contextmanager
def temporary() -> Iterator[Path]:
    """A new folder, removed at the end. Raises OSError."""
    folder, lock = _new()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_leftovers() -> None:
    """Removes the folders of compilations that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with suppress(OSError):
            _remove_unlocked(folder)


def _new() -> tuple[Path, int]:
    """Its path and the descriptor that locks it. Until it is locked others may remove it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        with suppress(FileNotFoundError):
            lock = _open(folder)
            fcntl.flock(lock, fcntl.LOCK_EX)
            if os.fstat(lock).st_nlink:
                return folder, lock
            os.close(lock)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)


def _remove_unlocked(folder: Path) -> None:
    opened = _open(folder)
    try:
        if os.fstat(opened).st_uid == os.geteuid():
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder)
    finally:
        os.close(opened)
