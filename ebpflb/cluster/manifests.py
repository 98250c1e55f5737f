# SPDX-License-Identifier: Apache-2.0
"""A directory of manifests as a source: looked at, then followed by inotify.

Files that inotify names are read again, once they are closed: half a file would be no YAML or,
worse, say less. Anything else that moves in the directory, such as the ``..data`` link that a
ConfigMap mount swaps, asks for a look at every file's signature. Every ``Pace.rescan`` seconds
there is one anyway: it finds what inotify cannot see, such as a link's target edited in place.
"""

import os
import select
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from inotify_simple import Event as Notice
from inotify_simple import INotify, flags

from ebpflb.cluster.folder import Folder, is_manifest
from ebpflb.cluster.pacing import Pace
from ebpflb.cluster.running import Runner
from ebpflb.cluster.source import Emit
from ebpflb.errors import ClusterError
from ebpflb.model.events import Event

LOST = flags.DELETE_SELF | flags.MOVE_SELF | flags.IGNORED | flags.UNMOUNT
MASK = (
    flags.CLOSE_WRITE
    | flags.MOVED_TO
    | flags.MOVED_FROM
    | flags.CREATE
    | flags.MODIFY
    | flags.DELETE
    | flags.DELETE_SELF
    | flags.MOVE_SELF
    | flags.ONLYDIR
)
RETURN = 1.0  # seconds: how soon a directory that comes back is noticed


class ManifestSource:
    """The objects of a directory's YAML files, in one thread. See ``source.Source``."""

    def __init__(
        self, emit: Emit, *, directory: Path, node_name: str, pace: Pace | None = None
    ) -> None:
        pace = pace or Pace()
        self._pace = replace(pace, cap=min(pace.cap, RETURN))
        self._directory = directory
        self._folder = Folder(directory, node_name)
        self._unfinished: set[str] = set()  # files open for writing, as far as inotify has told
        self._stopped = threading.Event()
        self._runner = Runner(str(directory), emit, self._pace, self._stopped)
        self._thread = threading.Thread(
            target=self._runner.run, args=(self._turn,), name="manifests", daemon=True
        )

    def start(self) -> None:
        """Raises ClusterError if there is no such directory."""
        if not self._directory.is_dir():
            raise ClusterError(f"{self._directory}: not a directory")
        self._wake = os.eventfd(0)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.is_alive():
            os.eventfd_write(self._wake, 1)
            self._thread.join(1)
            if not self._thread.is_alive():  # else it may still wait for it
                os.close(self._wake)

    def _turn(self) -> None:
        """Follow the directory until it is another one."""
        self._unfinished.clear()
        with self._inotify() as inotify:
            watch = self._watch(inotify)
            while self._watch(inotify) == watch and self._follow(inotify):
                pass

    def _follow(self, inotify: INotify) -> bool:
        """Look at everything, and follow the changes until the next look is due; whether it is."""
        end = time.monotonic() + self._pace.rescan
        self._tell(self._folder.look(besides=self._unfinished))
        self._runner.well()
        self._runner.progress()
        while time.monotonic() < end and not self._stopped.is_set():
            notices = self._wait(inotify, end - time.monotonic())
            if any(notice.mask & LOST for notice in notices):
                return False
            self._tell(self._news(notices))
        return not self._stopped.is_set()

    def _inotify(self) -> INotify:
        """Raises ClusterError if there are too many; each turn then still has its look."""
        try:
            return INotify()
        except OSError as error:
            self._tell(self._folder.look())
            reason = f"inotify: {error.strerror}; see sysctl fs.inotify.max_user_instances"
            raise ClusterError(reason) from error

    def _watch(self, inotify: INotify) -> int:
        """The watch's number: of one directory it is always the same."""
        try:
            return int(inotify.add_watch(self._directory, MASK))
        except OSError as error:
            raise ClusterError(f"{self._directory}: {error.strerror}") from error

    def _tell(self, events: Iterable[Event]) -> None:
        for event in events:
            self._runner.emit(event)

    def _wait(self, inotify: INotify, seconds: float) -> list[Notice]:
        poller = select.poll()
        poller.register(inotify, select.POLLIN)
        poller.register(self._wake, select.POLLIN)
        poller.poll(max(0.0, seconds) * 1000)
        return list(inotify.read(timeout=0))

    def _news(self, notices: list[Notice]) -> list[Event]:
        names = {notice.name for notice in notices if self._is_finished(notice)}
        names = {name for name in names if not is_scratch(name)}
        if all(map(is_manifest, names)):
            return self._folder.read(names - self._unfinished)
        return self._folder.look(besides=self._unfinished)

    def _is_finished(self, notice: Notice) -> bool:
        """Keep account of the files being written; a link is finished when it is created."""
        path = self._directory / notice.name
        begun = notice.mask & (flags.CREATE | flags.MODIFY)
        if begun and path.is_file() and not path.is_symlink():
            self._unfinished.add(notice.name)
            return False
        self._unfinished.discard(notice.name)
        return True


def is_scratch(name: str) -> bool:
    """An editor's hidden file, which is nobody's business; not a ConfigMap's ``..data``."""
    return name.startswith(".") and not name.startswith("..")
