# SPDX-License-Identifier: Apache-2.0
"""Live events as `ebpflb monitor` shows them, as server-sent events; each client has its own
stream.

A thread reads from the agent. Events that a client does not read in time, or that exceed
MOST_A_SECOND, are only counted: neither memory nor time grows with the traffic.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

import msgspec
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from ebpflb.tools.events import Told
from ebpflb_page.answering import BadInput, as_shown, sentence

MOST_FEEDS = 1  # at once: the agent serves one monitor
MOST_A_SECOND, MOST_KEPT = 200, 400
_SECONDS, _SILENT = 0.25, 5.0  # between two looks; a client that has gone is noticed after
ENDED = "the agent has stopped or reloaded its programs: choose Watch again"


class ToldBatch(NamedTuple):
    """Events, with None for an event that no filter passed, and how many the agent has lost."""

    events: Iterator[Told | None]
    lost: int


class WatchedEvents(NamedTuple):
    """The events: ``parts`` raises the errors of `ebpflb monitor`; any thread may call ``end``."""

    parts: Iterator[ToldBatch]
    end: Callable[[], None]


class EventFeed:
    """One client's events. ``opened`` returns when the programs are loaded."""

    def __init__(self, opened: Callable[[], WatchedEvents]) -> None:
        self._opened, self._lock = opened, threading.Lock()
        self._kept: deque[Told] = deque()
        self._watched: WatchedEvents | None = None
        self._is_over = self._begun = False
        self._lost = self._left_out = 0
        self.error = ""
        self._second, self._in_second = 0.0, 0

    def start(self) -> None:
        threading.Thread(target=self._run, name="events", daemon=True).start()

    def end(self) -> None:
        """End the thread, if it has not ended."""
        with self._lock:
            self._is_over = True
            if self._watched:
                self._watched.end()

    def take(self) -> dict[str, Any]:
        """Return the events since the last call; the counters count from the beginning."""
        with self._lock:
            events = [*self._kept]
            self._kept.clear()
            numbers = {"lost": self._lost, "left_out": self._left_out}
            return {"events": events, **numbers, "begun": self._begun, "error": self.error}

    def _run(self) -> None:
        try:
            watched = self._opened()
            with self._lock:
                self._watched, self._begun = watched, True
                if self._is_over:
                    watched.end()
            for part in watched.parts:
                self._add(part)
            self.error = ENDED
        except Exception as error:
            self.error = sentence(error)

    def _add(self, part: ToldBatch) -> None:
        for event in part.events:
            if event is not None:
                self._keep(event)
        with self._lock:
            self._lost = part.lost

    def _keep(self, event: Told) -> None:
        now = time.monotonic()
        with self._lock:
            if now - self._second >= 1:
                self._second, self._in_second = now, 0
            self._in_second += 1
            if self._in_second > MOST_A_SECOND or len(self._kept) >= MOST_KEPT:
                self._left_out += 1
            else:
                self._kept.append(event)


class LiveEvents:
    """All clients' feeds."""

    def __init__(self) -> None:
        self.feeds: set[EventFeed] = set()

    def response(self, opened: Callable[[], WatchedEvents]) -> "EventsResponse":
        """Return a response with a new stream. Raises BadInput if another client watches."""
        if len(self.feeds) >= MOST_FEEDS:
            raise BadInput("another page is watching events: close it", 503)
        return EventsResponse(EventFeed(opened), self.feeds)


class EventsResponse:
    """An ASGI response that ends its feed, however the response ends."""

    def __init__(self, feed: EventFeed, feeds: set[EventFeed]) -> None:
        self._feed, self.feeds = feed, feeds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.feeds.add(self._feed)
        self._feed.start()
        try:
            stream = StreamingResponse(told(self._feed), media_type="text/event-stream")
            await stream(scope, receive, send)
        finally:
            self._feed.end()
            self.feeds.discard(self._feed)


async def told(feed: EventFeed) -> AsyncIterator[bytes]:
    """Yield server-sent events, until the feed fails."""
    last, silent = b"", 0.0
    while True:
        found = feed.take()
        data = msgspec.json.encode(as_shown(msgspec.to_builtins(found)))
        silent += _SECONDS
        if data != last or found["events"] or silent >= _SILENT:
            yield b"data: " + data + b"\n\n"
            silent = 0.0
        last = data
        if found["error"]:
            return
        await asyncio.sleep(_SECONDS)
