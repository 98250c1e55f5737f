# SPDX-License-Identifier: Apache-2.0
"""Where a list and watch stands: the version up to which all has been emitted, and what since."""

import threading
from collections.abc import Set

from ebpflb.cluster.source import Emit
from ebpflb.model.events import Key, ObjectEvent, Replaced


class Position:
    """Of one kind. Its watching thread calls ``emit`` and ``restart``, another thread the rest."""

    def __init__(self, emit: Emit) -> None:
        self.version = ""  # where the next watch resumes; "": the objects are to be listed
        self._emit = emit
        self._lock = threading.Lock()
        self._since_mark: set[Key] | None = None  # None: no mark, or all has been listed since
        self._restarting = False

    def emit(self, event: ObjectEvent | None, version: str) -> None:
        """Emits what the server has said, after which this is its version; "": the same."""
        with self._lock:
            if isinstance(event, Replaced):
                self._since_mark, self._restarting = None, False
            elif event is not None and self._since_mark is not None:
                self._since_mark.add(event.key)
            if event is not None:
                self._emit(event)
            self.version = version or self.version

    def restart(self) -> None:
        """The next attempt is to list."""
        with self._lock:
            self.version, self._since_mark = "", None

    def mark(self) -> str:
        """From now on ``since_mark`` collects; the version up to which all has been emitted."""
        with self._lock:
            self._since_mark = set() if self.version else None
            return self.version

    def since_mark(self) -> Set[Key] | None:
        """The objects of which something was emitted since; None: all have been listed anew."""
        with self._lock:
            found, self._since_mark = self._since_mark, None
            return found

    def distrust(self) -> None:
        """Another thread asks that all be listed anew; ``restarting`` until that is emitted."""
        with self._lock:
            self._restarting = True

    @property
    def restarting(self) -> bool:
        return self._restarting
