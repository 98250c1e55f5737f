# SPDX-License-Identifier: Apache-2.0
"""Try again for ever: the loop that each source runs, its growing pauses, and all other waits.

An attempt is a function that returns when there is reason for another one, and raises when it
failed. A failure is reported as ``SourceStatus`` once per error and followed by a growing pause.
All times stand in ``Timing``, so that a test can make them short.
"""

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from ebpflb.cluster.source import Emit
from ebpflb.errors import ClusterError, in_words
from ebpflb.model.events import Event, SourceStatus
from ebpflb.redaction import redact

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """All times in seconds; ``jitter`` gives random numbers, uniform in [0, 1)."""

    backoff_first: float = 0.25  # pauses after failures: up to 0.25, 0.5, 1, 2, ... 30
    backoff_max: float = 30.0
    answer_timeout: float = 30.0  # the longest silence while a request is answered
    watch_timeout: float = 300.0  # a watch is asked to last this to twice this, as in client-go
    # Silence of a watch that means a dead connection: two bookmarks, which the API server sends
    # once a minute or a little later, did not come; and silence beyond the watch's end.
    watch_silence: float = 150.0
    watch_grace: float = 15.0
    # From one list to the next, this to twice this: an API server answers the lists of all nodes.
    list_interval: float = 4 * 3600.0
    missing_resource_delay: float = 300.0  # an older server may be replaced by one that has it
    settled_after: float = 2.0  # after so long without a change a file counts as written
    rescan_interval: float = 30.0  # a directory is scanned this often even if inotify is silent
    jitter: Callable[[], float] = random.random
    clock: Callable[[], float] = time.time  # seconds since the epoch
    monotonic: Callable[[], float] = time.monotonic
    new_event: Callable[[], threading.Event] = threading.Event  # its waits are the pauses

    def watch_seconds(self) -> int:
        """How long the next watch shall last: random, so that nodes do not reconnect together."""
        return max(1, int(self.watch_timeout * (1 + self.jitter())))

    def list_seconds(self) -> float:
        """When the objects are listed again: random, so that nodes do not list together."""
        return self.list_interval * (1 + self.jitter())


class Backoff:
    """Pauses that double up to the maximum, each between half and all of its length."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._length = timing.backoff_first

    def next(self) -> float:
        """The pause after one more failure, in seconds."""
        pause = self._length * (1 + self._timing.jitter()) / 2
        self._length = min(self._length * 2, self._timing.backoff_max)
        return pause

    def reset(self) -> None:
        """After a success: the next pause is the first one again."""
        self._length = self._timing.backoff_first


class RetryLoop:
    """Repeats attempts until stopped; ``source`` is the name in the SourceStatus."""

    def __init__(
        self,
        source: str,
        emit: Emit,
        timing: Timing,
        stopped: threading.Event,
        on_recovery: Callable[["RetryLoop"], None] = lambda loop: None,
    ) -> None:
        """``on_recovery`` is called when the source can be read after it could not."""
        self.source = source
        self.stopped, self._no_pause = stopped, timing.new_event()
        self._on_recovery = on_recovery
        self._emit = emit
        self.timing = timing
        self.monotonic = timing.monotonic
        self._backoff = Backoff(timing)
        self._error: str | None = None
        self._received_at: float | None = None  # of the monotonic clock

    def run(self, attempt: Callable[[], None]) -> None:
        while not self.stopped.is_set():
            self._no_pause.wait(self.run_once(attempt))
            self._no_pause.clear()

    def end_pause(self) -> None:
        """Ends the pause, or skips the next one; pauses begin with the first again.

        To be called from another thread: after ``stopped`` was set, or when there is reason to
        believe that an attempt would succeed.
        """
        self._backoff.reset()
        self._no_pause.set()

    def run_once(self, attempt: Callable[[], None]) -> float:
        """One attempt; returns the pause before the next one, in seconds."""
        try:
            attempt()
        except ClusterError as error:
            self._report(str(error))
        except Exception as error:
            # An error in this program; without this the thread would end without notice.
            log.exception("%s: unexpected", self.source)
            self._report(f"{type(error).__name__}: {in_words(error)}")
        else:
            return 0.0
        return self._backoff.next()

    def emit(self, event: Event) -> None:
        """Passes the event to the agent, unless the source has been stopped."""
        if not self.stopped.is_set():
            self._emit(event)

    def note_received(self) -> None:
        """The source has sent something, be it only that nothing is new."""
        self._received_at = self.monotonic()

    @property
    def received(self) -> float | None:
        """When the source last sent anything, in seconds since the epoch.

        By the clock as it is set now: what it has jumped since is not time that has passed.
        """
        at = self._received_at
        return None if at is None else self.timing.clock() - (self.monotonic() - at)

    def clear_error(self) -> None:
        """The source can be read: an error that was reported is over."""
        had_error = self._error is not None
        self._report(None)
        if had_error:
            self._on_recovery(self)

    def reset_backoff(self) -> None:
        """The source gave what it should: the next failure is a first one."""
        self._backoff.reset()

    def wait_for_resource(self) -> None:
        """Pauses: the server lacks the resource, which is no error."""
        self.stopped.wait(self.timing.missing_resource_delay)

    def _report(self, error: str | None) -> None:
        error = error and redact(error)  # a server may repeat what it was sent
        if error != self._error:
            self._error = error
            self.emit(SourceStatus(self.source, error))
