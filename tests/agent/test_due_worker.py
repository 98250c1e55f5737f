# SPDX-License-Identifier: Apache-2.0
"""A worker's thread takes its turn when something is due, and ends at the stop."""

import math
import threading
import time

from ebpflb.agent.due_worker import DueWorker

PATIENCE = 60.0  # seconds


class Counting(DueWorker):
    """Its turn is due at a time that a test sets."""

    def __init__(self) -> None:
        super().__init__("counting", time.monotonic)
        self.next, self.took = math.inf, threading.Event()

    @property
    def due(self) -> float:
        return self.next

    def turn(self) -> None:
        self.next = math.inf
        self.took.set()

    def set_due(self, at: float) -> None:
        with self._changed:
            self.next = at
            self._changed.notify()


def test_a_turn_is_taken_when_it_is_due() -> None:
    """Also while the thread waits for one that is due never."""
    worker = Counting()
    worker.start()
    try:
        for _ in range(2):
            worker.took.clear()
            worker.set_due(time.monotonic())
            assert worker.took.wait(PATIENCE)
    finally:
        worker.stop()


def test_it_stops_while_nothing_is_due_and_before_it_was_started() -> None:
    """Neither waits."""
    Counting().stop()
    worker = Counting()
    worker.start()
    worker.stop()
    assert not worker.took.is_set()
