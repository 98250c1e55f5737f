# SPDX-License-Identifier: Apache-2.0
"""A value that is read anew now and then, and that all clients share meanwhile."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

SECONDS = 2.0  # at least, from one reading to the next

_Value = TypeVar("_Value")


class Paced(Generic[_Value]):
    """Read when somebody asks, at most once in SECONDS, and for one ``part``-th of the time.

    Safe in several threads: one reads, and the others wait for what it has read.
    """

    def __init__(
        self, read: Callable[[], _Value], part: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read, self._part, self._clock = read, part, clock
        self._lock = threading.Lock()
        self._value: _Value | None = None
        self._next = self._at = 0.0

    def get(self) -> _Value:
        """Raises what the reading raises; the next call then reads again."""
        with self._lock:
            now = self._clock()
            if self._value is None or now >= self._next:
                self._value, self._at = self._read(), now
                self._next = now + max(SECONDS, (self._clock() - now) * self._part)
            return self._value

    @property
    def age(self) -> float:
        """Seconds since the reading of the value began."""
        return self._clock() - self._at
