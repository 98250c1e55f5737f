# SPDX-License-Identifier: Apache-2.0
"""Files: replaced in one step, read up to a limit, locked."""

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

log = logging.getLogger(__name__)

_CHECKOUT = Path(__file__).parents[1] / "docs"
# The documentation: beside the package in a checkout, else where setup.cfg's data_files puts it.
DOCS = (
    _CHECKOUT if (_CHECKOUT / "runbook.md").exists() else Path(sys.prefix) / "share/doc/ebpflb/docs"
)
Decoded = TypeVar("Decoded")

MAX_BYTES = 16 << 20  # as YAML this takes 20 s to read, in which no other file is read


class UnusableFile(Exception):
    """The file is not regular, or too large; the message is for the operator."""


def read_regular(path: Path, most: int = MAX_BYTES) -> bytes:
    """Read an untrusted file, up to a size limit. Raises UnusableFile or OSError."""
    with open_regular(path, most) as file:
        data = file.read(most + 1) or b""  # a file in /proc has no size, and may block
    if len(data) > most:
        raise UnusableFile(_too_large(most))
    return data


def open_regular(path: Path, most: int, *, follow: bool = True) -> IO[bytes]:
    """Open an untrusted file of at most ``most`` bytes. Raises UnusableFile or OSError."""
    links = 0 if follow else os.O_NOFOLLOW
    opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | links)
    status = os.fstat(opened)
    is_regular = stat.S_ISREG(status.st_mode)
    if is_regular and status.st_size <= most:
        return open(opened, "rb")
    os.close(opened)
    raise UnusableFile(_too_large(most) if is_regular else "not a regular file")


def says_one(path: Path) -> bool:
    """Whether a file of the kernel contains the number 1; False if it cannot be read."""
    with suppress(OSError):
        return path.read_text().strip() == "1"
    return False


def decode_regular(path: Path, type: type[Decoded], most: int = MAX_BYTES) -> Decoded | None:
    """Return the content of an agent's JSON file; None if there is none.

    An invalid file is logged and treated as missing.
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


def _too_large(most: int) -> str:
    return f"larger than {most >> 20} MiB"


def replace(path: Path, content: bytes, mode: int = 0o600) -> None:
    """Replace a file in one step. Raises OSError; then the old file is left unchanged."""
    name = ""
    try:
        half, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with open(half, "wb") as file:
            file.write(content)
            os.fchmod(half, mode)
        os.replace(name, path)
    except BaseException as error:  # Ctrl-C too
        with suppress(OSError):  # none was made, or the file system is read-only now
            os.unlink(name)
        if isinstance(error, OSError):
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def lock(opened: int) -> bool:
    """Lock a file or directory until it is closed; return False if another process has locked it.

    Tries for a fifth of a second, because ``is_locked`` takes the lock for a moment.
    """
    for _ in range(20):
        with suppress(BlockingIOError):
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(0.01)
    return False


def is_locked(path: Path) -> bool:
    """Whether a process has locked a file or directory; False if it cannot be opened."""
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
