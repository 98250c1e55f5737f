# SPDX-License-Identifier: Apache-2.0
"""Threads that repeat their work until they are stopped.

They wait for a time (PeriodicWorker, DueWorker), for work in steps (StepWorker), or for descriptors
(DescriptorWorker). An unexpected exception ends no thread: its work is tried again, and the failure
is a condition of the agent (stopping.Parts).
"""

import logging
import math
import os
import selectors
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from typing import ClassVar, Protocol, TypeVar

from ebpflb.errors import EbpflbError, in_words, log_once
from ebpflb.model.events import SourceStatus
from ebpflb.stopping import RETRY_SECONDS, parts

log = logging.getLogger(__name__)


class HasFileno(Protocol):
    """A socket, or anything else with a descriptor."""

    def fileno(self) -> int: ...


_Source = TypeVar("_Source", bound=HasFileno)
_Readable = TypeVar("_Readable", bound=int | HasFileno)


def readable(sources: Iterable[_Readable], seconds: float) -> list[_Readable]:
    """Return the sources that can be read; wait at most ``seconds`` until a source can.

    Any descriptor works, while select(2) fails from number 1,024 on.
    """
    with selectors.PollSelector() as selector:
        for source in sources:
            selector.register(source, selectors.EVENT_READ, source)
        ready = selector.select(None if seconds == math.inf else seconds)
    return [key.data for key, _ in ready]


class Worker(ABC):
    """A thread that calls ``run``, which returns soon after ``stopped`` is set.

    After an unexpected exception ``run`` is called again.
    """

    patience: ClassVar[float | None] = None  # seconds that ``stop`` waits for the thread's end

    def __init__(self, name: str) -> None:
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._has_waited = False  # a DescriptorWorker, in the current call of ``run``

    def _run(self) -> None:
        while not parts.attempt(self.thread.name, self.run):
            self._has_waited = False
            if self.stopped.wait(RETRY_SECONDS):
                return

    @property
    def has_failed(self) -> bool:
        """Whether ``run`` is called again after an exception: earlier notifications may be lost."""
        return parts.is_failing(self.thread.name)

    @abstractmethod
    def run(self) -> None:
        """Do the work until ``stopped`` is set."""

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """Stop the thread, and wait for its end if it was started."""
        self.stopped.set()
        if self.thread.ident:
            self.thread.join(self.patience)


class PeriodicWorker(Worker):
    """Take a turn every ``interval`` seconds; a failed turn is logged once for each reason.

    ``failing`` is what the log says about a failed turn. The interval is the pause between two
    turns; for a ``steady`` worker it is the time between their starts, and the first turn starts at
    once. It sleeps while ``wanted`` is not set.
    """

    def __init__(
        self, name: str, interval: float, *, failing: str = "", steady: bool = False
    ) -> None:
        super().__init__(name)
        self.interval, self._failing, self._steady = interval, failing or name, steady
        self._error: str | None = None
        self.wanted = threading.Event()
        self.wanted.set()

    @abstractmethod
    def turn(self) -> None:
        """Do the repeated work."""

    def run(self) -> None:
        pause = 0.0 if self._steady else self.interval
        while not self.stopped.is_set() and self.wanted.wait() and not self.stopped.wait(pause):
            begun = time.monotonic()
            parts.attempt(self.thread.name, self._turn)
            pause = self.interval - (time.monotonic() - begun if self._steady else 0.0)

    def want(self, wanted: object) -> None:
        """Let the thread work if ``wanted`` is true, else let it sleep."""
        if wanted:
            self.wanted.set()
        else:
            self.wanted.clear()

    def stop(self) -> None:
        self.stopped.set()
        self.wanted.set()
        super().stop()

    def _turn(self) -> None:
        try:
            self.turn()
            self._error = None
        except (EbpflbError, OSError) as error:
            self._error = log_once(log.error, f"{self._failing}: %s", in_words(error), self._error)


class DueWorker(Worker):
    """Take a turn each time that ``due`` has come.

    ``clock`` is a monotonic clock, in seconds, and the thread waits ``until`` a time of it. A
    caller that makes something due earlier notifies ``changed``.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        super().__init__(name)
        self._clock, self.until = clock, math.inf
        self.changed = threading.Condition()

    @property
    @abstractmethod
    def due(self) -> float:
        """When ``turn`` is due, by the clock; infinity means not before the next change."""

    @abstractmethod
    def turn(self) -> None:
        """Do the due work."""

    def stop(self) -> None:
        self.stopped.set()
        with self.changed:
            self.changed.notify()
        super().stop()

    def run(self) -> None:
        while self._wait():
            if not parts.attempt(self.thread.name, self.turn):
                self.stopped.wait(RETRY_SECONDS)

    def _wait(self) -> bool:
        """Return True when something is due; False at the stop."""
        with self.changed:
            while not self.stopped.is_set():
                self.until = self.due
                wait = self.until - self._clock()
                if wait <= 0:
                    return True
                self.changed.wait(min(wait, threading.TIMEOUT_MAX))
        return False


class StepWorker:
    """Take the steps of an iterator, in a thread that ends with the last one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._halted = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, steps: Iterator[None]) -> None:
        """Take these steps instead of the remaining ones."""
        self.halt()
        self._halted = halted = threading.Event()

        def take() -> None:
            while not halted.is_set() and next(steps, _END) is not _END:
                pass

        attempt = partial(parts.attempt, self._name, take)
        self._thread = threading.Thread(target=attempt, name=self._name, daemon=True)
        self._thread.start()

    def halt(self) -> None:
        """Drop the remaining steps; return when no step is being taken."""
        self._halted.set()
        if self._thread:
            self._thread.join()

    stop = halt


_END = object()  # of an iterator


class DescriptorWorker(Worker):
    """Wait for descriptors in a thread; ``wake`` and ``stop`` end a wait."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._woken = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def wait(self, sources: Iterable[_Source], seconds: float) -> list[_Source]:
        """Return the readable sources: none after ``seconds``, or after ``wake``.

        The work since the last call counts as a successful turn.
        """
        if self._has_waited:
            parts.succeeded(self.thread.name)
        self._has_waited = True
        waited_for: list[int | _Source] = [self._woken, *sources]
        ready = readable(waited_for, seconds)
        if self._woken in ready:
            os.eventfd_read(self._woken)
        return [each for each in ready if not isinstance(each, int)]

    def wake(self) -> None:
        if self._woken >= 0:
            os.eventfd_write(self._woken, 1)

    def stop(self) -> None:
        self.stopped.set()
        self.wake()
        super().stop()
        if self._woken >= 0 and not self.thread.is_alive():  # otherwise it may still poll it
            os.close(self._woken)
            self._woken = -1


class Poller:
    """Each call runs ``poll``, and emits a SourceStatus when it fails or recovers."""

    def __init__(
        self, source: str, poll: Callable[[], None], emit: Callable[[SourceStatus], None]
    ) -> None:
        self._source, self._poll, self._emit = source, poll, emit
        self._error: str | None = None

    def __call__(self) -> bool:
        """Return whether it succeeded."""
        failure = None
        try:
            self._poll()
        except (EbpflbError, OSError) as error:
            failure = in_words(error)
        if failure != self._error:
            self._error = failure
            self._emit(SourceStatus(self._source, failure))
        return failure is None


# Make calls in parallel, on the cores that this process may use.
#
# bpf(2) is called without Python's lock, and the kernel verifies several programs of a privileged
# process at a time, and allocates several maps.


T = TypeVar("T")

_MOST_THREADS = 4  # the longest call takes as long as all others in two or three threads


def side_by_side(calls: Iterable[Callable[[], T]], discard: Callable[[T], object]) -> list[T]:
    """Run the calls in several threads; return their results in order.

    If a call raises, calls that have not begun are dropped, the results of finished calls are
    passed to ``discard``, and the first error is raised.
    """
    with ThreadPoolExecutor(min(usable_cores(), _MOST_THREADS), "side-by-side") as threads:
        futures = [threads.submit(call) for call in calls]
        wait(futures, return_when=FIRST_EXCEPTION)
        threads.shutdown(cancel_futures=True)
    made = [future for future in futures if not future.cancelled()]
    errors = [error for future in made if (error := future.exception())]
    if errors:
        for future in made:
            if not future.exception():
                discard(future.result())
        raise errors[0]
    return [future.result() for future in futures]


def usable_cores() -> int:
    return len(os.sched_getaffinity(0))
