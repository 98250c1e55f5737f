# SPDX-License-Identifier: Apache-2.0
"""Child processes, whatever directory and environment this process was started with.

The agent is root: a program or module that is looked for in the working directory, or where a
variable of the environment says, would be anybody's.
"""

import errno
import os
import shutil
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

_STANDARD = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SECONDS = 120.0


def path() -> str:
    """Return the absolute directories of PATH: the working directory may be anybody's."""
    return ":".join(filter(os.path.isabs, os.environ.get("PATH", _STANDARD).split(":")))


def find(program: str) -> str | None:
    """Return where a program is in ``path``; None if it is in none of its directories."""
    return shutil.which(program, path=path())


def environment() -> dict[str, str]:
    """Return all that a child gets: no variable that makes it load something; plain English."""
    return {"PATH": path(), "LANG": "C.UTF-8"}


def run(command: Sequence[str], script: str = "") -> "subprocess.CompletedProcess[str]":
    """Runs a program of ``path`` in the root directory, with ``script`` as its stdin.

    Raises OSError if it cannot be started; one that is not there is a FileNotFoundError. One that
    has not ended after SECONDS is killed, which is a TimeoutError.
    """
    process = start(command, subprocess.PIPE)
    try:
        out, errors = process.communicate(script.encode(), timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # it may be stuck in the kernel
            process.wait(1.0)
        raise TimeoutError(errno.ETIMEDOUT, f"no answer in {SECONDS:g} s", command[0]) from None
    texts = [each.decode(errors="replace") for each in (out, errors)]
    return subprocess.CompletedProcess(command, process.returncode, *texts)


def start(command: Sequence[str], stdin: int = subprocess.DEVNULL) -> "subprocess.Popen[bytes]":
    """As ``run``, but does not wait: stdout and stderr are pipes. Raises OSError."""
    return subprocess.Popen(
        [_found(command[0]), *command[1:]],
        stdin=stdin,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
        env=environment(),
    )


def become(command: Sequence[str]) -> NoReturn:
    """Replace this process by a program of ``path``, for an operator's shell. Raises OSError."""
    os.execv(_found(command[0]), list(command))


def _found(program: str) -> str:
    found = find(program)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), program)
    return found
