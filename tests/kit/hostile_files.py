# SPDX-License-Identifier: Apache-2.0
"""Files of odd kinds in place of a program's own file."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

HUGE = 10 << 40  # bytes, all of them holes
# Too large, a name that is not UTF-8, a device in a container, or no such kind of file.
_NOT_HERE = (errno.EFBIG, errno.EILSEQ, errno.EPERM, errno.EOPNOTSUPP)


def holes(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HUGE)


def lay(make: Callable[[Path], object], path: Path) -> None:
    """Put a file of this kind there; skip the test if the file system or the kernel lacks the
    kind.
    """
    try:
        make(path)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
        pytest.skip(f"no such file here: {error}")


HOSTILE: dict[str, Callable[[Path], object]] = {
    "nothing at all": Path.touch,
    "garbage": lambda path: path.write_bytes(os.urandom(1000)),
    "JSON of another kind": lambda path: path.write_text("[1, 2]"),
    "JSON without end": lambda path: path.write_text('{"a": ' + "[" * 200_000),
    "a pipe": os.mkfifo,
    "a directory": Path.mkdir,
    "a loop of links": lambda path: path.symlink_to(path),
    "a link to nowhere": lambda path: path.symlink_to("/nowhere/at/all"),
    "a link to a device without end": lambda path: path.symlink_to("/dev/zero"),
    "a link to a device that blocks": lambda path: path.symlink_to("/dev/ptmx"),
    "a link to what cannot be read": lambda path: path.symlink_to("/proc/self/mem"),
    "a link to a file of /proc that blocks": lambda path: path.symlink_to("/proc/kmsg"),
    "holes": holes,
}
# For readers of YAML: libyaml bounds no nesting, and root's own files are trusted.
NOT_NESTED = {name: make for name, make in HOSTILE.items() if name != "JSON without end"}
