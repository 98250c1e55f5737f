# SPDX-License-Identifier: Apache-2.0
"""The lock of a state directory: on the directory itself, whatever path or mount leads to it.

It is held by an agent as long as it runs, and by what removes the directory. It belongs to the
inode, so it holds across containers and bind mounts; only root may open the directory.
"""

import os
import stat
from contextlib import suppress
from pathlib import Path

from ebpflb import files
from ebpflb.datapath.maps.state_dir import mount_bpffs
from ebpflb.errors import NodeError


class StateLock:
    """The lock of one state directory, which ``take`` makes if need be."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._opened: int | None = None

    def take(self) -> bool:
        """Whether nobody else has it. Raises NodeError if there cannot be such a directory."""
        mount_bpffs(self.directory)
        while True:
            opened = self._open()
            if not files.lock(opened):
                os.close(opened)
                return False
            if self._is_here(opened):
                self._opened = opened
                return True
            os.close(opened)  # it has been removed meanwhile

    def holds(self) -> bool:
        """Whether it is held, of the directory that has the name now: a bpffs that was mounted anew
        has another one.
        """
        return self._opened is not None and self._is_here(self._opened)

    def release(self) -> None:
        if self._opened is not None:
            os.close(self._opened)
            self._opened = None

    def _open(self) -> int:
        try:
            self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            opened = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise NodeError(f"{self.directory}: {error.strerror}") from error
        try:
            _make_private(opened, self.directory)
        except NodeError:
            os.close(opened)
            raise
        return opened

    def _is_here(self, opened: int) -> bool:
        try:
            return os.path.samestat(os.fstat(opened), os.stat(self.directory))
        except OSError:
            return False


def _make_private(opened: int, directory: Path) -> None:
    """A bpffs may let everybody make directories; others could hold the lock of one of theirs."""
    found = os.fstat(opened)
    if found.st_uid not in (0, os.geteuid()):
        raise NodeError(f"{directory}: belongs to another user (uid {found.st_uid}): remove it")
    if stat.S_IMODE(found.st_mode) & 0o077:
        with suppress(PermissionError):
            os.fchmod(opened, 0o700)
