# SPDX-License-Identifier: Apache-2.0
"""The events that a source emitted, and the short waits of a test."""

import queue
from collections.abc import Callable
from typing import Any

from ebpflb.cluster.pacing import Pace
from ebpflb.cluster.source import Source
from ebpflb.model.events import Event, Kind, SourceStatus
from tests.cluster.fake_api import PATIENCE

NODE = "node-1"
QUICK = Pace(first=0.01, cap=0.05, answer=5, watch=20, grace=5, rescan=20)

Start = Callable[..., Source]
Begin = Callable[[Source], Source]
Quick = Callable[..., Pace]


class Heard:
    """The events that a source emitted, asked for one by one: of a kind, or troubles."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Event] = queue.Queue()
        self._kept: list[Event] = []

    def __call__(self, event: Event) -> None:
        self._queue.put(event)

    def of(self, kind: Kind) -> Any:
        """The next event of this kind, waiting for it if need be."""
        return self._next(lambda event: not isinstance(event, SourceStatus) and event.kind is kind)

    def trouble(self) -> SourceStatus:
        event = self._next(lambda event: isinstance(event, SourceStatus))
        assert isinstance(event, SourceStatus)
        return event

    def reason(self) -> str:
        """Why there is trouble; the next Trouble must not be the end of one."""
        reason = self.trouble().error
        assert reason is not None
        return reason

    def everything(self) -> list[Event]:
        """All events heard so far and not yet asked for; does not wait."""
        while not self._queue.empty():
            self._kept.append(self._queue.get())
        kept, self._kept = self._kept, []
        return kept

    def _next(self, wanted: Callable[[Event], bool]) -> Event:
        for position, event in enumerate(self._kept):
            if wanted(event):
                return self._kept.pop(position)
        while not wanted(event := self._queue.get(timeout=PATIENCE)):
            self._kept.append(event)
        return event
