# SPDX-License-Identifier: Apache-2.0
"""Child processes, whatever directory and environment this process was started with.

The agent is root: a program or module that is looked for in the working directory, or where a
variable of the environment says, would be anybody's.
"""

import os
import shutil
import stat
import subprocess
from collections.abc import Mapping, Sequence

_STANDARD = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def path() -> str:
    """The directories of PATH that only root and this user may write; never the working one."""
    listed = os.environ.get("PATH", _STANDARD).split(":")
    return ":".join(folder for folder in listed if _is_safe(folder))


def find(program: str) -> str | None:
    """Where a program is in ``path``."""
    return shutil.which(program, path=path())


def environment() -> dict[str, str]:
    """All that a child gets: no variable that makes it load something, nor another language."""
    return {"PATH": path(), "LANG": "C.UTF-8"}


def run(command: Sequence[str], script: str = "") -> "subprocess.CompletedProcess[str]":
    """Runs a program of ``path`` in the root directory, with ``script`` as its stdin.

    Raises OSError if it cannot be started; one that is not there is a FileNotFoundError.
    """
    program = find(command[0])
    if program is None:
        raise FileNotFoundError(2, "No such file or directory", command[0])
    return subprocess.run(
        [program, *command[1:]],
        input=script,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        cwd="/",
        env=environment(),
    )


def inherited() -> Mapping[str, str]:
    """The environment of this process with a safe PATH, for programs of the operator's own."""
    return {**os.environ, "PATH": path()}


def _is_safe(folder: str) -> bool:
    if not os.path.isabs(folder):
        return False
    try:
        found = os.stat(folder)
    except OSError:
        return False
    is_ours = found.st_uid in (0, os.geteuid())
    return stat.S_ISDIR(found.st_mode) and is_ours and not found.st_mode & stat.S_IWOTH
