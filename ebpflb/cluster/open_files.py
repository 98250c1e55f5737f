# SPDX-License-Identifier: Apache-2.0
"""Which files of a directory are being written, as far as inotify has reported.

When its queue overflows, events are lost, and nobody knows whether a file that was open has been
closed since. Such a file counts as open until it has not been changed for a while.
"""

import time
from collections.abc import Callable
from pathlib import Path

from inotify_simple import Event, flags

from ebpflb.cluster.retry import Timing


class OpenFiles:
    """``clock`` gives seconds since the epoch, as files' times do."""

    def __init__(
        self, directory: Path, timing: Timing, clock: Callable[[], float] = time.time
    ) -> None:
        self._directory = directory
        self._settled_after = timing.settled_after
        self._clock = clock
        self._open: set[str] = set()
        self._unsure: set[str] = set()  # were open when events were lost

    def is_finished(self, event: Event) -> bool:
        """Whether the file that the event is about can be read; a link can once it is created."""
        path = self._directory / event.name
        begun = event.mask & (flags.CREATE | flags.MODIFY)
        if begun and path.is_file() and not path.is_symlink():
            self._open.add(event.name)
            return False
        self._open.discard(event.name)
        self._unsure.discard(event.name)
        return True

    def events_lost(self) -> None:
        """Whatever was open may be closed by now."""
        self._unsure |= self._open
        self._open.clear()

    def clear(self) -> None:
        """It is another directory."""
        self._open.clear()
        self._unsure.clear()

    @property
    def unsure(self) -> bool:
        """Whether ``names`` may get fewer without an event."""
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
