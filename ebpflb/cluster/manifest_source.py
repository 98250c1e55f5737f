# SPDX-License-Identifier: Apache-2.0
"""A directory of manifests as a source: scanned, then followed with inotify.

A file that inotify names is read again when it has been closed: half a file would be invalid YAML
or, worse, would define fewer objects. Any other change in the directory, such as the ``..data``
link that a ConfigMap mount replaces, causes a scan. So does ``Timing.rescan_interval``: a scan
finds changes that inotify cannot see, such as those of the target of a link. After inotify's queue
overflowed, events are lost, and every file is read again.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from inotify_simple import Event as InotifyEvent
from inotify_simple import INotify, flags

from ebpflb.cluster.manifest_directory import ManifestDirectory, is_manifest
from ebpflb.cluster.retry import RetryLoop, Timing
from ebpflb.cluster.source import Emit
from ebpflb.errors import ClusterError
from ebpflb.model.events import Event, Together
from ebpflb.workers import DescriptorWorker

# Which files of a directory are being written, according to inotify.
#
# When inotify's queue overflows, events are lost, and it is unknown whether an open file has been
# closed since. Such a file counts as open until it has not changed for a while.


class OpenFiles:
    """``clock`` returns seconds since the epoch, as files' times do."""

    def __init__(
        self, directory: Path, timing: Timing, clock: Callable[[], float] = time.time
    ) -> None:
        self._directory = directory
        self._settled_after = timing.settled_after
        self._clock = clock
        self._open: set[str] = set()
        self._unsure: set[str] = set()  # were open when events were lost

    def is_finished(self, event: InotifyEvent) -> bool:
        """Whether the file of the event can be read; a link can as soon as it is created."""
        path = self._directory / event.name
        begun = event.mask & (flags.CREATE | flags.MODIFY)
        if begun and path.is_file() and not path.is_symlink():
            self._open.add(event.name)
            return False
        self._open.discard(event.name)
        self._unsure.discard(event.name)
        return True

    def events_lost(self) -> None:
        """Note that events were lost: open files may be closed by now."""
        self._unsure |= self._open
        self._open.clear()

    def clear(self) -> None:
        """Forget all files: the directory is another one."""
        self._open.clear()
        self._unsure.clear()

    @property
    def unsure(self) -> bool:
        """Whether ``names`` may lose a file without an event."""
        return bool(self._unsure)

    def names(self) -> set[str]:
        self._unsure = {name for name in self._unsure if not self._is_settled(name)}
        return self._open | self._unsure

    def _is_settled(self, name: str) -> bool:
        try:
            changed = (self._directory / name).stat().st_mtime
        except OSError:
            return True
        return not 0 <= self._clock() - changed < self._settled_after


log = logging.getLogger(__name__)

DIRECTORY_LOST = flags.DELETE_SELF | flags.MOVE_SELF | flags.IGNORED | flags.UNMOUNT
_INOTIFY_MASK = (
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
MAX_BACKOFF = 1.0  # seconds: how soon a returning directory is noticed


class ManifestSource(DescriptorWorker):
    """The objects of a directory's YAML files, in one thread. See ``source.Source``."""

    patience = 1.0  # a file system may keep the thread for longer

    def __init__(
        self, emit: Emit, *, directory: Path, node_name: str, timing: Timing | None = None
    ) -> None:
        super().__init__("manifests")
        timing = timing or Timing()
        self._timing = replace(timing, backoff_max=min(timing.backoff_max, MAX_BACKOFF))
        self._directory = directory
        self._manifests = ManifestDirectory(directory, node_name)
        self._open_files = OpenFiles(directory, self._timing)
        self._events_lost = False
        self._loop = RetryLoop(str(directory), emit, self._timing, self.stopped)

    def prepare(self) -> None:
        """Check the directory. Raises ClusterError if there is none."""
        if not self._directory.is_dir():
            raise ClusterError(f"{self._directory}: not a directory")

    def start(self) -> None:
        """Start the thread. Raises ClusterError if there is no such directory."""
        self.prepare()
        super().start()

    def run(self) -> None:
        self._loop.run(self._follow_directory)

    def received(self) -> dict[str, float]:
        """Return one time for all kinds: a scan reads every change."""
        return {} if self._loop.received is None else {"manifests": self._loop.received}

    def stop(self) -> None:
        self.stopped.set()
        self._loop.end_pause()
        super().stop()

    def _follow_directory(self) -> None:
        """Follow the directory; return when the path has become another directory."""
        self._open_files.clear()
        with self._inotify() as inotify:
            watch = self._watch(inotify)
            while self._watch(inotify) == watch and self._follow(inotify):
                pass

    def _follow(self, inotify: INotify) -> bool:
        """Scan once and follow the changes; return whether it is time for the next scan."""
        skip, everything = self._open_files.names(), self._events_lost
        self._emit(self._manifests.scan(skip=skip, everything=everything))
        self._events_lost = False
        pause = self._timing.settled_after if self._open_files.unsure else math.inf
        end = time.monotonic() + min(pause, self._timing.rescan_interval)
        self._loop.note_received()
        self._loop.clear_error()
        self._loop.reset_backoff()
        while time.monotonic() < end and not self.stopped.is_set():
            self.wait([inotify], end - time.monotonic())
            inotify_events = inotify.read(timeout=0)
            if any(event.mask & flags.Q_OVERFLOW for event in inotify_events):
                self._lose_events()
                return True
            if any(event.mask & DIRECTORY_LOST for event in inotify_events):
                return False
            self._emit(self._events_for(inotify_events))
        return not self.stopped.is_set()

    def _lose_events(self) -> None:
        log.warning("%s: inotify lost events: reading every file again", self._directory)
        self._open_files.events_lost()
        self._events_lost = True

    def _inotify(self) -> INotify:
        """Create an instance. Raises ClusterError if there are too many, after a scan."""
        try:
            return INotify()
        except OSError as error:
            self._emit(self._manifests.scan())
            reason = f"inotify: {error.strerror}; see sysctl fs.inotify.max_user_instances"
            raise ClusterError(reason) from error

    def _watch(self, inotify: INotify) -> int:
        """Return the watch descriptor, which stays the same for the same directory."""
        try:
            return int(inotify.add_watch(self._directory, _INOTIFY_MASK))
        except OSError as error:
            raise ClusterError(f"{self._directory}: {error.strerror}") from error

    def _emit(self, events: Sequence[Event]) -> None:
        """Emit what was read at once as one change: a Service and its slices fit together."""
        if events:
            self._loop.emit(Together(tuple(events)))

    def _events_for(self, inotify_events: list[InotifyEvent]) -> list[Event]:
        names = {
            inotify_event.name
            for inotify_event in inotify_events
            if self._open_files.is_finished(inotify_event)
        }
        names = {name for name in names if not is_hidden(name)}
        if all(map(is_manifest, names)):
            return self._manifests.read(names - self._open_files.names())
        return self._manifests.scan(skip=self._open_files.names())


def is_hidden(name: str) -> bool:
    """Whether it is an editor's hidden file, to be ignored; a ConfigMap's ``..data`` is not."""
    return name.startswith(".") and not name.startswith("..")
