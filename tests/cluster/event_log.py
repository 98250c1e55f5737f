# SPDX-License-Identifier: Apache-2.0
"""The events that a source emitted, and short waits for tests."""

import queue
from collections.abc import Callable
from typing import Any

from ebpflb.cluster.source import Source, Timing
from ebpflb.model.events import Event, Kind, SourceStatus, Together
from tests.kit.api_server import WAIT_SECONDS

NODE = "node-1"
QUICK = Timing(
    backoff_first=0.01,
    backoff_max=0.05,
    answer_timeout=5,
    watch_timeout=20,
    watch_grace=5,
    rescan_interval=20,
    settled_after=0.05,
)

Start = Callable[..., Source]
Begin = Callable[[Source], Source]
Quick = Callable[..., Timing]


class EventLog:
    """The events that a source emitted, read one by one, by kind or as SourceStatus."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Event] = queue.Queue()
        self._skipped: list[Event] = []

    def __call__(self, event: Event | Together) -> None:
        for each in event.events if isinstance(event, Together) else (event,):
            self._queue.put(each)

    def next(self, kind: Kind) -> Any:
        """Return the next event of this kind; wait for it if needed."""
        return self._next(lambda event: not isinstance(event, SourceStatus) and event.kind is kind)

    def source_status(self) -> SourceStatus:
        event = self._next(lambda event: isinstance(event, SourceStatus))
        assert isinstance(event, SourceStatus)
        return event

    def error(self) -> str:
        """Return why the source cannot be read; fail if the next SourceStatus is a recovery."""
        reason = self.source_status().error
        assert reason is not None
        return reason

    def all(self) -> list[Event]:
        """Return all events so far that were not returned yet, without waiting."""
        while not self._queue.empty():
            self._skipped.append(self._queue.get())
        kept, self._skipped = self._skipped, []
        return kept

    def _next(self, wanted: Callable[[Event], bool]) -> Event:
        for position, event in enumerate(self._skipped):
            if wanted(event):
                return self._skipped.pop(position)
        while not wanted(event := self._queue.get(timeout=WAIT_SECONDS)):
            self._skipped.append(event)
        return event
