# SPDX-License-Identifier: Apache-2.0
"""Errors of the lab: one line each for the person who started it."""

import shutil
from pathlib import Path


class LabError(Exception):
    """Something is missing or failed; the message says what, and how to get it."""


def tool(name: str, package: str) -> str:
    """Return the path of a program. Raises LabError with the package that has it."""
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if found is None:
        raise LabError(f"{name} is missing: apt install --no-install-recommends {package}")
    return found


def need(path: Path, package: str) -> Path:
    """Return a file that a package installs. Raises LabError with the package's name."""
    if not path.exists():
        raise LabError(f"{path} is missing: apt install --no-install-recommends {package}")
    return path
