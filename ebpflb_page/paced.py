# SPDX-License-Identifier: Apache-2.0
"""A value that is read now and then, and that all clients share meanwhile."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

SECONDS = 2.0  # at least, from one reading to the next
QUICK_SECONDS = 0.2  # clients wait for a reading that takes no longer
KEPT_SECONDS = 30.0  # clients wait where the next reading has been due for longer

_Value = TypeVar("_Value")


class Paced(Generic[_Value]):
    """Read when a client asks, at most once in SECONDS, and for one ``part``-th of the time.

    Safe in several threads: one reads. A value that takes long to read is read in a thread of its
    own, and clients get the last one meanwhile.
    """

    def __init__(
        self, read: Callable[[], _Value], part: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._read, self._part, self._clock = read, part, clock
        self._lock = threading.Lock()
        self._value: _Value | None = None
        self._next = self._at = self._took = 0.0
        self._is_reading = False

    def get(self) -> _Value:
        """Raises what the reading raises; the next call then reads again."""
        with self._lock:
            late = self._clock() - self._next
            if self._value is not None and (late < 0 or self._is_reading):
                return self._value
            if self._value is None or late > KEPT_SECONDS or self._took <= QUICK_SECONDS:
                at = self._clock()
                return self._keep(self._read(), at)
            self._is_reading = True
            threading.Thread(target=self._read_alone, name="paced", daemon=True).start()
            return self._value

    @property
    def age(self) -> float:
        """Seconds since the reading of the value began."""
        return self._clock() - self._at

    def _keep(self, value: _Value, at: float) -> _Value:
        self._value, self._at = value, at
        self._took = self._clock() - at
        self._next = at + max(SECONDS, self._took * self._part)
        return value

    def _read_alone(self) -> None:
        """After an error the next client reads, and gets the error if there still is one."""
        at = self._clock()
        try:
            value = self._read()
        except Exception:
            value = None
        with self._lock:
            self._is_reading = False
            if value is None:
                self._value = None
            else:
                self._keep(value, at)
