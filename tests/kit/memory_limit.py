# SPDX-License-Identifier: Apache-2.0
"""A cgroup with a memory limit, beyond which the kernel kills its processes."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ebpflb.errors import NodeError
from ebpflb.kernel.attach.cgroup_links import cgroup_root

_V1 = Path("/sys/fs/cgroup/memory")


class MemoryLimit:
    """``folder`` is the cgroup, of either version."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._is_v1 = folder.parent == _V1

    def set(self, size: int) -> None:
        """Limit the memory, and allow no swap if swap has a separate limit."""
        name = "memory.limit_in_bytes" if self._is_v1 else "memory.max"
        (self.folder / name).write_text(str(size))
        swap = self.folder / ("memory.swappiness" if self._is_v1 else "memory.swap.max")
        with suppress(OSError):
            swap.write_text("0")

    def take(self, pid: int) -> None:
        """Count the process's further allocations in this cgroup."""
        (self.folder / "cgroup.procs").write_text(str(pid))

    @property
    def kills(self) -> int:
        """Return how many processes the kernel has killed because of the limit."""
        name = "memory.oom_control" if self._is_v1 else "memory.events"
        lines = (line.split() for line in (self.folder / name).read_text().splitlines())
        return int(dict(lines)["oom_kill"])


@contextmanager
def memory_limit(name: str) -> Iterator[MemoryLimit]:
    """Yield a cgroup, which must be empty at the end. Skips the test without memory cgroups."""
    folder = _parent() / name
    folder.mkdir()
    try:
        yield MemoryLimit(folder)
    finally:
        folder.rmdir()


def _parent() -> Path:
    if _V1.is_dir():
        return _V1
    with suppress(NodeError, OSError):
        root = cgroup_root()
        if "memory" in (root / "cgroup.subtree_control").read_text().split():
            return root
    pytest.skip("memory has no cgroups here")
