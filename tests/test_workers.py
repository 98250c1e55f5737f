# SPDX-License-Identifier: Apache-2.0
"""A worker's thread takes its turn when something is due or can be read, and ends at the stop."""

import math
import socket
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from ebpflb.errors import NodeError
from ebpflb.stopping import FailedThreads
from ebpflb.workers import DescriptorWorker, DueWorker, PeriodicWorker, StepWorker

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
        with self.changed:
            self.next = at
            self.changed.notify()


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


class Timed(Counting):
    """Its clock is at 0 when first asked, and at 1 later; ``taken``: when it took its turn."""

    def __init__(self) -> None:
        super().__init__()
        self._clock, self.now, self.taken = self._ask, -1.0, -1.0

    def _ask(self) -> float:
        self.now = min(self.now + 1, 1.0)
        return self.now

    def turn(self) -> None:
        self.taken = self.now
        super().turn()


def test_no_turn_is_taken_early() -> None:
    """What is due soon by the clock waits until then."""
    worker = Timed()
    worker.next = 0.01
    worker.start()
    try:
        assert worker.took.wait(PATIENCE)
    finally:
        worker.stop()
    assert worker.taken == 1


def test_it_stops_while_nothing_is_due_and_before_it_was_started() -> None:
    """Neither waits."""
    Counting().stop()
    worker = Counting()
    worker.start()
    worker.stop()
    assert not worker.took.is_set()


class Repeating(PeriodicWorker):
    """Its turns fail as a test says."""

    def __init__(self, **how: Any) -> None:
        super().__init__("repeating", 0.001, failing="repeating failed", **how)
        self.failures: list[Exception | None] = []
        self.done = threading.Event()

    def turn(self) -> None:
        if not self.failures:
            self.done.set()
        elif failure := self.failures.pop(0):
            raise failure


@pytest.mark.parametrize("steady", [True, False])
def test_turns_that_fail_are_logged_once_and_repeated(
    steady: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """What is expected in one line, a mistake of the program with its traceback."""
    worker = Repeating(steady=steady)
    worker.failures = [NodeError("a"), NodeError("a"), KeyError("b"), None, NodeError("a")]
    worker.start()
    assert worker.done.wait(PATIENCE)
    worker.stop()
    assert [each.getMessage() for each in caplog.records] == [
        "repeating failed: a",
        "repeating failed: 'b'",
        "repeating failed: a",
    ]
    assert [bool(each.exc_info) for each in caplog.records] == [False, True, False]


class Waiting(DescriptorWorker):
    """Tells what it could read."""

    def __init__(self, source: socket.socket) -> None:
        super().__init__("waiting")
        self.source, self.read = source, SimpleQueue[list[Any]]()

    def run(self) -> None:
        while not self.stopped.is_set():
            self.read.put(ready := self.wait([self.source], math.inf))
            if ready:
                self.source.recv(1)


def test_descriptors_and_wakes_are_waited_for() -> None:
    """A wake is no source; it can be stopped before it was started, and twice."""
    here, there = socket.socketpair()
    with here, there:
        Waiting(here).stop()
        worker = Waiting(here)
        worker.start()
        worker.wake()
        assert worker.read.get(timeout=PATIENCE) == []
        there.send(b"x")
        assert worker.read.get(timeout=PATIENCE) == [here]
        worker.stop()
        worker.stop()
        worker.wake()
        assert not worker.thread.is_alive()


def test_a_worker_that_fails_ends_the_agent() -> None:
    """As any thread of it: what it did is not done any more."""
    former, stopped = threading.excepthook, threading.Event()
    here, there = socket.socketpair()
    here.close()
    there.close()
    try:
        failed = FailedThreads(stopped.set)
        worker = Waiting(here)
        worker.start()
        assert stopped.wait(PATIENCE)
        worker.stop()
    finally:
        threading.excepthook = former
    assert failed.name == "waiting"


def test_steps_end_at_a_halt() -> None:
    """``halt`` waits for the step that is being taken, and no further step follows; other steps
    may be begun afterwards.
    """
    taken: list[str] = []
    begun, go_on, ended = threading.Event(), threading.Event(), threading.Event()

    def steps() -> Iterator[None]:
        begun.set()
        go_on.wait(PATIENCE)
        taken.append("first")
        yield
        taken.append("never")
        yield

    def others() -> Iterator[None]:
        taken.append("other")
        yield
        ended.set()

    worker = StepWorker("steps")
    worker.begin(steps())
    try:
        assert begun.wait(PATIENCE)
        threading.Timer(0.05, go_on.set).start()
        worker.halt()
        assert taken == ["first"]
        worker.begin(others())
        assert ended.wait(PATIENCE)
    finally:
        worker.stop()
    assert taken == ["first", "other"]


def test_a_failed_step_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """``halt`` returns although a step has ended the thread."""
    monkeypatch.setattr(threading, "excepthook", lambda failure: None)

    def steps() -> Iterator[None]:
        yield from iter([None])
        raise ValueError

    worker = StepWorker("steps")
    worker.begin(steps())
    worker.thread.join(PATIENCE)
    assert not worker.thread.is_alive()
    worker.halt()
