# SPDX-License-Identifier: Apache-2.0
"""A thread that acts whenever something is due."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable


class DueWorker(ABC):
    """Run ``turn`` in a thread, from ``start`` to ``stop``, each time that ``due`` has come.

    ``clock`` is a monotonic clock, in seconds. A caller that makes something due notifies
    ``_changed``.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    @abstractmethod
    def due(self) -> float:
        """When ``turn`` is due, by the clock; infinity means not before the next change."""

    @abstractmethod
    def turn(self) -> None:
        """Do the due work. Raises nothing."""

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop; return when ``turn`` does not run any more."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
        if self._thread.ident:
            self._thread.join()

    def _run(self) -> None:
        while self._wait():
            self.turn()

    def _wait(self) -> bool:
        """Wait until something is due; return False at the stop."""
        with self._changed:
            while not self._stopped:
                wait = self.due - self._clock()
                if wait <= 0:
                    return True
                self._changed.wait(min(wait, threading.TIMEOUT_MAX))
        return False
