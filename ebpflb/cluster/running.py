# SPDX-License-Identifier: Apache-2.0
"""One turn after the other for ever: the endless loop, too small to be wrong.

A turn is a finite function that returns when there is reason for another, and raises when it
failed. Failures are told as ``Trouble`` once per reason and followed by a growing pause.
"""

import logging
import threading
from collections.abc import Callable

from ebpflb.cluster.pacing import Backoff, Pace
from ebpflb.cluster.source import Emit
from ebpflb.errors import ClusterError
from ebpflb.model.events import Event, SourceStatus

log = logging.getLogger(__name__)


class Runner:
    """Repeats turns until stopped; ``source`` is the name in its Trouble."""

    def __init__(self, source: str, emit: Emit, pace: Pace, stopped: threading.Event) -> None:
        self.source = source
        self.stopped = stopped
        self._emit = emit
        self._pace = pace
        self._backoff = Backoff(pace)
        self._trouble: str | None = None

    def run(self, turn: Callable[[], None]) -> None:
        while not self.stopped.wait(self.attempt(turn)):
            pass

    def attempt(self, turn: Callable[[], None]) -> float:
        """One turn; returns the pause before the next, in seconds."""
        try:
            turn()
        except ClusterError as error:
            self._told(str(error))
        except Exception as error:
            # Our own mistake; a thread that dies of it in silence would be a worse one.
            log.exception("%s: unexpected", self.source)
            self._told(repr(error))
        else:
            return 0.0
        return self._backoff.next()

    def emit(self, event: Event) -> None:
        """Tell the agent, unless it has stopped us."""
        if not self.stopped.is_set():
            self._emit(event)

    def well(self) -> None:
        """The source can be read: any trouble is over."""
        self._told(None)

    def progress(self) -> None:
        """The source gave what it should: the next failure is a first one."""
        self._backoff.reset()

    def rest(self) -> None:
        """There is nothing to read for now, and that is all right."""
        self.stopped.wait(self._pace.absent)

    def _told(self, reason: str | None) -> None:
        if reason != self._trouble:
            self._trouble = reason
            self.emit(SourceStatus(self.source, reason))
