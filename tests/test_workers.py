# SPDX-License-Identifier: Apache-2.0
"""A worker's thread takes its turn when something is due or readable, and ends at the stop."""

import math
import socket
import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from ebpflb import workers
from ebpflb.errors import NodeError
from ebpflb.lab.agents import wait_until
from ebpflb.workers import DescriptorWorker, DueWorker, PeriodicWorker, StepWorker
from tests.kit.failing import Failing

PATIENCE = 60.0  # seconds


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make failed turns repeat without a pause."""
    monkeypatch.setattr(workers, "RETRY_SECONDS", 0.0)


class Counting(DueWorker):
    """A worker whose turn is due at a time that a test sets."""

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
    """A due turn is taken, even if the thread was waiting without a due time."""
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
    """A worker whose clock is 0 at first, and 1 later; ``taken`` is the time of its turn."""

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
    """A turn that is due soon waits until it is due."""
    worker = Timed()
    worker.next = 0.01
    worker.start()
    try:
        assert worker.took.wait(PATIENCE)
    finally:
        worker.stop()
    assert worker.taken == 1


def test_it_stops_while_nothing_is_due_and_before_it_was_started() -> None:
    """The worker stops at once while nothing is due, and before it was started."""
    Counting().stop()
    worker = Counting()
    worker.start()
    worker.stop()
    assert not worker.took.is_set()


class Repeating(PeriodicWorker):
    """A worker whose turns fail as the test says."""

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
    steady: bool, failing: Failing, caplog: pytest.LogCaptureFixture
) -> None:
    """An expected error is one line; a bug is reported to the agent."""
    worker = Repeating(steady=steady)
    worker.failures = [NodeError("a"), NodeError("a"), KeyError("b"), None, NodeError("a")]
    worker.start()
    assert worker.done.wait(PATIENCE)
    worker.stop()
    said = [each.getMessage() for each in caplog.records]
    assert said == [
        "repeating failed: a",
        "part repeating failed: KeyError: 'b'",
        "part repeating works again",
        "repeating failed: a",
    ]
    assert [each.error for each in failing.told] == ["KeyError: 'b'", None]


class Waiting(DescriptorWorker):
    """A worker that reports which sources it could read."""

    def __init__(self, source: socket.socket) -> None:
        super().__init__("waiting")
        self.source, self.read = source, SimpleQueue[list[Any]]()

    def run(self) -> None:
        while not self.stopped.is_set():
            self.read.put(ready := self.wait([self.source], math.inf))
            if ready:
                self.source.recv(1)


def test_descriptors_and_wakes_are_waited_for() -> None:
    """A wake is not a source; the worker may be stopped before its start, and twice."""
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


class Due(Counting):
    """A worker whose first turns fail, and stay due."""

    failures = 2

    def turn(self) -> None:
        if self.failures:
            self.failures -= 1
            raise KeyError("due")
        super().turn()


@pytest.mark.usefixtures("at_once")
def test_a_turn_that_fails_is_due_again(failing: Failing) -> None:
    worker = Due()
    worker.next = 0.0
    worker.start()
    assert worker.took.wait(PATIENCE)
    worker.stop()
    assert [each.error for each in failing.told] == ["KeyError: 'due'", None]


class Reading(Waiting):
    """A worker that fails for each x that it reads."""

    def run(self) -> None:
        while not self.stopped.is_set():
            if self.wait([self.source], math.inf) and self.source.recv(1) == b"x":
                raise KeyError("x")
            self.read.put([])


@pytest.mark.usefixtures("at_once")
def test_a_worker_that_fails_begins_again(failing: Failing) -> None:
    """The worker works again only after reading without a failure: waiting is no success."""
    here, there = socket.socketpair()
    with here, there:
        worker = Reading(here)
        worker.start()
        there.send(b"xx")
        there.send(b"y")
        assert worker.read.get(timeout=PATIENCE) == []
        worker.stop()
    assert [each.error for each in failing.told] == ["KeyError: 'x'", None]


def test_steps_end_at_a_halt() -> None:
    """``halt`` waits for the current step, and no further step follows; other steps may begin
    afterwards.
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


@pytest.mark.usefixtures("at_once")
def test_a_failed_step_holds_nothing_up(failing: Failing) -> None:
    """``halt`` returns, the remaining steps are dropped, and new steps can begin."""
    ended = threading.Event()

    def steps() -> Iterator[None]:
        yield from iter([None])
        raise ValueError

    def others() -> Iterator[None]:
        yield None
        ended.set()

    worker = StepWorker("steps")
    worker.begin(steps())
    wait_until("it has failed", lambda: bool(failing.told))
    worker.begin(others())
    assert ended.wait(PATIENCE)
    worker.stop()
    assert [each.error for each in failing.told] == ["ValueError: ValueError", None]
