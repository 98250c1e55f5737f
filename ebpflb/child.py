# SPDX-License-Identifier: Apache-2.0
"""Child processes, whatever directory and environment this process was started with.

The agent is root: a program that loads modules from the working directory, or from a path in an
environment variable, could run anyone's code.
"""

import errno
import os
import subprocess
from collections.abc import Sequence

SECONDS = 120.0


def environment() -> dict[str, str]:
    """Return a child's environment, without variables that make it load code, and for English
    messages.
    """
    return {"PATH": os.environ.get("PATH", os.defpath), "LANG": "C.UTF-8"}


def run(command: Sequence[str], script: str = "") -> "subprocess.CompletedProcess[str]":
    """Run a program in the root directory, with ``script`` as its stdin.

    Raises FileNotFoundError if there is no such program, another OSError if it cannot be started,
    and TimeoutError if it does not end within SECONDS; then it is killed.
    """
    try:
        return subprocess.run(
            command,
            input=script,
            capture_output=True,
            check=False,
            errors="replace",
            timeout=SECONDS,
            cwd="/",
            env=environment(),
        )
    except subprocess.TimeoutExpired:
        raise TimeoutError(errno.ETIMEDOUT, f"no answer in {SECONDS:g} s", command[0]) from None
