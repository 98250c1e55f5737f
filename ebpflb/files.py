# SPDX-License-Identifier: Apache-2.0
"""Files that are this user's own: written in one step, read and held by nobody else."""

import fcntl
import os
import tempfile
import time
from contextlib import suppress
from pathlib import Path


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
