# SPDX-License-Identifier: Apache-2.0
"""The configuration file, while we run: told once when it is written, replaced or renamed.

kube-proxy then ends so as to be started again with the new one (kube-proxy.md 15). A mounted
ConfigMap is swapped by its link ``..data``, which the file's own inode does not show: so both
directories are watched, and what counts is whether another file is found behind the name. A file
that is gone for a moment is no change yet.
"""

import logging
import os
import select
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

from inotify_simple import INotify, flags

log = logging.getLogger(__name__)

LOOK = 10.0  # seconds: how soon what inotify cannot see is seen
MASK = flags.CLOSE_WRITE | flags.MODIFY | flags.MOVED_TO | flags.MOVED_FROM | flags.CREATE

Signature = tuple[int, ...]


class ConfigWatch:
    """Knows the file as it is when this is made: make it before the file is read."""

    def __init__(self, path: Path) -> None:
        self.changed = False
        self.path = path.absolute()
        self._inotify: INotify | None = None
        self._known = _signature(self.path)
        self._stopped = threading.Event()
        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="config", daemon=True)

    def start(self, on_change: Callable[[], None]) -> None:
        """``on_change`` is called once, from a thread of the watch's own."""
        self._on_change = on_change
        self._inotify = self._watch()
        self._thread.start()

    def stop(self) -> None:
        """From any thread but its own. Nothing is told afterwards."""
        self._stopped.set()
        os.eventfd_write(self._wake, 1)
        if self._thread.ident:
            self._thread.join()
        os.close(self._wake)

    def _watch(self) -> INotify | None:
        """Without it looks every now and then must do."""
        try:
            inotify = INotify()
            for directory in {self.path.parent, self.path.resolve().parent}:
                inotify.add_watch(directory, MASK)
        except OSError as error:
            log.warning("%s: looked at every %g s: %s", self.path, LOOK, error.strerror)
            return None
        return inotify

    def _run(self) -> None:
        moved = False
        with self._inotify or nullcontext():
            while not (moved or self._is_another()):
                moved = self._wait()
                if self._stopped.is_set():
                    return
        self.changed = True
        self._on_change()

    def _is_another(self) -> bool:
        return _signature(self.path) not in (None, self._known)

    def _wait(self) -> bool:
        """For something to look at; whether the file was moved away."""
        poller = select.poll()
        for waker in (self._inotify, self._wake):
            if waker is not None:
                poller.register(waker, select.POLLIN)
        poller.poll(LOOK * 1000)
        notices = self._inotify.read(timeout=0) if self._inotify else []
        return any(each.name == self.path.name and each.mask & flags.MOVED_FROM for each in notices)


def _signature(path: Path) -> Signature | None:
    """What is different for every other file behind the name, and after every write to it."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
