# SPDX-License-Identifier: Apache-2.0
"""Watch the configuration file while the agent runs, and report one change.

When the file is written, replaced or renamed, kube-proxy exits to be restarted with the new file
(kube-proxy.md 15). The kubelet updates a mounted ConfigMap by replacing the symbolic link
``..data``, which does not change the file's inode. Therefore the directories of the link and of its
target are watched, and the file behind the name is compared. A file that temporarily does not exist
does not count as changed.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from inotify_simple import INotify, flags

from ebpflb.workers import DescriptorWorker

log = logging.getLogger(__name__)

POLL_SECONDS = 10.0  # between two comparisons without an event of inotify
_INOTIFY_MASK = flags.CLOSE_WRITE | flags.MODIFY | flags.MOVED_TO | flags.MOVED_FROM | flags.CREATE

_Signature = tuple[int, ...]


class ConfigWatch(DescriptorWorker):
    """The file at this object's creation is the reference: create it before reading the file."""

    def __init__(self, path: Path) -> None:
        super().__init__("config")
        self.changed = False
        self.path = path.absolute()
        self._inotify: INotify | None = None
        self._known = _signature(self.path)

    def start(self, on_change: Callable[[], None] = lambda: None) -> None:
        """Start; ``on_change`` is called once, from the thread of the watch; not after ``stop``."""
        self._on_change = on_change
        self._inotify = self._watch()
        super().start()

    def _watch(self) -> INotify | None:
        """Return an inotify instance; None if it is not available: then the file is only polled."""
        try:
            inotify = INotify()
            for directory in {self.path.parent, self.path.resolve().parent}:
                inotify.add_watch(directory, _INOTIFY_MASK)
        except OSError as error:
            log.warning(
                "%s: no inotify, polling every %g s instead: %s",
                self.path,
                POLL_SECONDS,
                error.strerror,
            )
            return None
        return inotify

    def stop(self) -> None:
        super().stop()
        if self._inotify:
            self._inotify.close()

    def run(self) -> None:
        moved = False
        while not (moved or self._has_changed()):
            moved = self._is_moved()
            if self.stopped.is_set():
                return
        self.changed = True
        self._on_change()

    def _has_changed(self) -> bool:
        return _signature(self.path) not in (None, self._known)

    def _is_moved(self) -> bool:
        """Wait for an event or the poll interval; return whether the file was renamed."""
        self.wait([self._inotify] if self._inotify else [], POLL_SECONDS)
        events = self._inotify.read(timeout=0) if self._inotify else []
        return any(each.name == self.path.name and each.mask & flags.MOVED_FROM for each in events)


def _signature(path: Path) -> _Signature | None:
    """Return values that differ for another file and after each write; None: no file."""
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
