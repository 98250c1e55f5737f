# SPDX-License-Identifier: Apache-2.0
"""What other threads tell the agent's loop."""

import math
import time
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
    """Ends the loop. A signal handler may put it: SimpleQueue is reentrant."""


_Asked = Question[Any] | Order
Message = Event | DevicesChanged | Detection | Disturbed | ConnectionsReset | _Asked | Stop
Inbox = SimpleQueue[Message]


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

    def waiting(self, seconds: float) -> list[Message]:
        """All messages that are there; waits so long for the first one."""
        try:
            messages = [self._inbox.get(timeout=seconds)]
        except Empty:
            return []
        if gathering := GATHERING if self._close >= _MANY else 0.0:
            self._sleep(gathering)
        while not self._inbox.empty():
            messages.append(self._inbox.get())
        apart, self._last = self._clock() - self._last - gathering, self._clock()
        self._close = self._close + 1 if apart < _CLOSE else 0
        return messages
