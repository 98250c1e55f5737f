# SPDX-License-Identifier: Apache-2.0
"""What other threads tell the agent's loop."""

import math
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from ebpflb.agent.canary_requests import Order
from ebpflb.agent.inspection import Question
from ebpflb.model.events import Disturbed, Event
from ebpflb.model.kube_proxy import Detection
from ebpflb.node.device_watch import DevicesChanged
from ebpflb.on_removal.reset_worker import ConnectionsReset


class Stop:
    """Ends the loop. A signal handler may put it: ``Inbox.put`` is reentrant."""


_Asked = Question[Any] | Order
Message = Event | DevicesChanged | Detection | Disturbed | ConnectionsReset | _Asked | Stop


class Inbox:
    """The messages, in their order. Any thread puts them, and may ask for the age; one takes them.

    ``clock`` is a monotonic one, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._messages: SimpleQueue[Message] = SimpleQueue()
        self._put_at: deque[float] = deque()  # of the messages that are not handled yet

    def put(self, message: Message) -> None:
        self._put_at.append(self._clock())
        self._messages.put(message)

    def take(self, seconds: float) -> Message | None:
        """The next message; waits so long for one."""
        try:
            return self._messages.get(timeout=seconds)
        except Empty:
            return None

    def handled(self, count: int) -> None:
        """The oldest messages that were taken have had their effect."""
        for _ in range(count):
            self._put_at.popleft()

    @property
    def age(self) -> float:
        """Seconds since the oldest message was put that is not handled; 0 where there is none."""
        try:
            return self._clock() - self._put_at[0]
        except IndexError:
            return 0.0


GATHERING = 0.005  # seconds that changes of a burst wait for others to share their sync
_CLOSE = 0.005  # seconds between two turns of a burst, at most, without the gathering
_MANY = 5  # such turns in succession are a burst


class Bursts:
    """Takes messages from the inbox; those of a burst, above some 200 a second, several at a time.

    A message that comes alone, among a few others, or among 100 a second, never waits. ``clock`` is
    a monotonic one, in seconds.
    """

    def __init__(
        self,
        inbox: Inbox,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = lambda seconds: time.sleep(seconds),
    ) -> None:
        self._inbox, self._clock, self._sleep = inbox, clock, sleep
        self._last = -math.inf  # when a turn with messages began
        self._close = 0  # such turns in succession
        self._taken = 0  # messages, by the last call

    def waiting(self, seconds: float) -> list[Message]:
        """All messages that are there; waits so long for the first one.

        Those of the call before are handled.
        """
        self._inbox.handled(self._taken)
        messages = self._taking(seconds)
        self._taken = len(messages)
        return messages

    def _taking(self, seconds: float) -> list[Message]:
        first = self._inbox.take(seconds)
        if first is None:
            return []
        messages = [first]
        if gathering := GATHERING if self._close >= _MANY else 0.0:
            self._sleep(gathering)
        while (message := self._inbox.take(0.0)) is not None:
            messages.append(message)
        apart, self._last = self._clock() - self._last - gathering, self._clock()
        self._close = self._close + 1 if apart < _CLOSE else 0
        return messages
