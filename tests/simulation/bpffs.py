# SPDX-License-Identifier: Apache-2.0
"""Paths in a bpffs in memory, with the part of pathlib that the agent uses."""

from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from tests.simulation.kernel import SimKernel


class BpffsPath(PurePosixPath):
    """A path in the bpffs of ``kernel``; ``folders`` are the directories that exist."""

    kernel: SimKernel
    folders: set[str]
    joined: dict[tuple[str, str], "BpffsPath"]  # what was joined before: pathlib is slow

    def __truediv__(self, name: Any) -> "BpffsPath":
        both = str(self), str(name)
        if both not in self.joined:
            self.joined[both] = super().__truediv__(name)
        return self.joined[both]

    def exists(self) -> bool:
        return str(self) in self.kernel.pins or self.is_dir()

    def is_dir(self) -> bool:
        return str(self) in self.folders

    def is_symlink(self) -> bool:
        return False

    def mkdir(self, **_: Any) -> None:
        self.folders.update(map(str, (self, *self.parents)))

    def iterdir(self) -> Iterator["BpffsPath"]:
        start = f"{self}/"
        names = {
            path.removeprefix(start)
            for path in (*self.kernel.pins, *self.folders)
            if path.startswith(start)
        }
        yield from [self / name for name in sorted(names) if "/" not in name]

    def unlink(self, missing_ok: bool = False) -> None:
        if str(self) not in self.kernel.pins and not missing_ok:
            raise FileNotFoundError(str(self))
        self.kernel.change(f"unpinning {self.name}", self._remove, False)

    def rmdir(self) -> None:
        self.folders.discard(str(self))

    def _remove(self) -> None:
        self.kernel.pins.pop(str(self), None)


def root(kernel: SimKernel) -> BpffsPath:
    """Return the state directory of a new bpffs."""
    made: type[BpffsPath] = type(
        "Path", (BpffsPath,), {"kernel": kernel, "folders": set(), "joined": {}}
    )
    return made("/sys/fs/bpf/simulation")
