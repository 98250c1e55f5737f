# SPDX-License-Identifier: Apache-2.0
"""The kernels of the lab: those of kernels.cfg, and one of arm64."""

from pathlib import Path
from typing import NamedTuple

from vagrant.kernels.errors import LabError

LIST = Path(__file__).with_name("kernels.cfg")


class Kernel(NamedTuple):
    """A kernel, and where Debian has it."""

    name: str
    suite: str
    archive: str
    architecture: str = "amd64"


# Only where it is named: not with every change, and not as a machine of Vagrant.
ARM64 = Kernel("6.1-arm64", "bookworm-security", "http://deb.debian.org/debian-security", "arm64")


def kernels(text: str | None = None) -> dict[str, Kernel]:
    """Return every kernel of the list, by name."""
    lines = (LIST.read_text() if text is None else text).splitlines()
    words = [line.split() for line in lines if line.strip() and not line.startswith("#")]
    for line in words:
        if len(line) != 3:
            raise LabError(f"{LIST.name}: name, suite and archive are wanted: {' '.join(line)}")
    return {line[0]: Kernel(*line) for line in words}


def named(name: str) -> Kernel:
    """Return the kernel of that name. Raises LabError with all names."""
    known = kernels() | {ARM64.name: ARM64}
    if name not in known:
        raise LabError(f"unknown kernel {name!r}: there are {', '.join(known)}")
    return known[name]
