# SPDX-License-Identifier: Apache-2.0
"""The agent's loop over its parts: take messages, give each part that is due its turn, publish.

Sources and watches put messages into the inbox, each from its own thread. One thread runs the loop:
it waits for messages, hands them to the parts that take them, and gives each part its turn that is
due. Most important is the part that writes the maps (sync.py). Then every part may look at what was
taken and written, and the agent's status is published. A part that fails stops no other.
"""

import ctypes
import gc
import logging
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, Generic, TypeVar

from ebpflb import stopping
from ebpflb.history.records import WriteCause
from ebpflb.model.cluster_state import Applied
from ebpflb.model.events import ObjectEvent, PartStatus, Together
from ebpflb.stopping import parts

log = logging.getLogger(__name__)

MOST_TAKING = 0.01  # seconds, for the messages of one turn
GATHERING = 0.005  # seconds for which changes of a burst wait for others to share their turn
_MANY = 5  # successive turns, each less than GATHERING after the one before, are a burst
STATUS_PAUSE = 0.1  # seconds between two statuses, of a burst of changes
ANSWER_SECONDS = 2.0  # a loop that is starting, or waiting for the kernel, does not answer
_Answer = TypeVar("_Answer")


class Stop:
    """A message that ends the loop. A signal handler may put it: ``Inbox.put`` is reentrant."""


class Call(Generic[_Answer]):
    """A message: a function that the loop calls, and the answer of the function."""

    def __init__(self, do: Callable[[], _Answer]) -> None:
        self._do = do
        self._answer: Future[_Answer] = Future()

    def answer(self) -> None:
        """Call the function; called by the loop. Raises nothing."""
        if not self._answer.set_running_or_notify_cancel():
            return
        try:
            self._answer.set_result(self._do())
        except Exception as error:
            self._answer.set_exception(error)

    def cancel(self) -> None:
        """Cancel the call: its answer is no longer needed."""
        self._answer.cancel()

    def result(self, seconds: float | None = None) -> _Answer:
        """Return the answer. Raises TimeoutError if the loop does not begin to answer in time."""
        try:
            return self._answer.result(seconds or ANSWER_SECONDS)
        except TimeoutError:
            if self._answer.cancel():
                raise
            return self._answer.result()


@dataclass(eq=False)
class Turn:
    """What the loop has taken and written in one turn.

    ``seconds``: of writing all changes, or of the failed attempt; None if there was none. ``full``:
    everything was planned. ``node``: the node's devices or addresses may be others. ``serves``:
    everything is in force. ``fatal``: an error after which
    the agent ends.
    """

    applied: list[tuple[ObjectEvent, Applied]] = field(default_factory=list)
    causes: list[WriteCause] = field(default_factory=list)
    seconds: float | None = None
    has_failed: bool = False
    full: bool = False
    node: bool = False
    has_new_devices: bool = False  # that have got programs: packets may have passed them before
    attached: bool = False  # programs are in force
    serves: bool = False
    fatal: Exception | None = None

    @property
    def is_usual(self) -> bool:
        """Whether this turn wrote nothing but changes of Services, and all of them took effect."""
        is_other = self.has_failed or self.full or self.node
        return self.serves and self.seconds is not None and not is_other


class Part:
    """A part of the agent; build.py lists all parts, in the order of their turns.

    ``name``: in the status, if the part fails. ``takes``: the types of messages that it takes.
    """

    name: ClassVar[str]
    takes: ClassVar[tuple[type, ...]] = ()

    @property
    def due(self) -> float:
        """When ``turn`` is due, by the loop's clock; infinity means not before a message."""
        return math.inf

    def started(self) -> None:
        """Prepare the first turn. Raises an error that ends the agent."""

    def take(self, message: Any) -> None:
        """Take a message."""

    def turn(self) -> None:
        """Do what is due."""

    def observe(self, turn: Turn) -> None:
        """Look at what was taken and written, at the end of each turn of the loop."""

    def status(self) -> Mapping[str, Any]:
        """Return the fields of AgentStatus that this part knows."""
        return {}

    def ended(self) -> None:
        """Clean up at the end of the agent. Raises nothing."""


class Inbox:
    """The messages in order; any thread may put them and read the age, one thread takes them.

    In a burst, above some 200 messages per second, several are taken at a time; a message that
    comes alone, or among a few others, never waits. ``clock`` is a monotonic clock, in seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._turned, self._close = -math.inf, 0  # the last turn with messages; of a burst
        self._messages: SimpleQueue[object] = SimpleQueue()
        self._put_at: deque[float] = deque()  # of messages that have not had their effect yet
        self._taken = 0  # messages, by the last call of ``waiting``

    def put(self, message: object) -> None:
        self._put_at.append(self._clock())
        self._messages.put(message)

    def ask(self, do: Callable[[], _Answer]) -> _Answer:
        """Have the loop call the function; return its answer, or raise its exception.

        Raises TimeoutError if the loop does not begin to answer in time.
        """
        call = Call(do)
        self.put(call)
        return call.result()

    def take(self, seconds: float) -> object | None:
        """Return the next message; wait for one up to ``seconds``."""
        try:
            return self._messages.get(timeout=seconds)
        except Empty:
            return None

    def waiting(self, seconds: float, most: float = MOST_TAKING) -> Iterator[object]:
        """Yield the waiting messages; wait for the first one up to ``seconds``.

        Messages that take longer than ``most`` seconds are left to the next call, so that what is
        known by then can be written. The messages of the previous call have had their effect.
        """
        for _ in range(self._taken):
            self._put_at.popleft()
        self._taken = 0
        message = self.take(seconds)
        if message is not None:
            self._gather()
        begun = self._clock()
        while message is not None:
            self._taken += 1
            yield message
            is_late = self._clock() - begun > most
            message = None if is_late else self.take(0.0)

    def _gather(self) -> None:
        apart = self._clock() - self._turned
        self._close = self._close + 1 if apart < GATHERING else 0
        if self._close >= _MANY:
            self._sleep(GATHERING)
        self._turned = self._clock()

    @property
    def age(self) -> float:
        """Seconds since the oldest unhandled message was put; 0 if there is none."""
        try:
            return self._clock() - self._put_at[0]
        except IndexError:
            return 0.0


# When Python's cyclic garbage collector runs, and what malloc(3) keeps: the whole policy.
#
# A large cluster's objects are created at the start and stay as long as the agent runs. While they
# are created, each full collection would go through all of them and find nothing. So the collector
# is off until everything is programmed; then the existing objects are frozen, and from then on it
# only checks objects that are created later; all of those seldom, as no part leaves cycles.

_ARENA_MAX, _MMAP_THRESHOLD = -8, -3  # mallopt(3), glibc only
_LARGE = 256 << 10  # bytes: smaller than a page of a list
# A full collection finds nothing, and with 100,000 endpoints stops all threads for 0.1 s.
_FULL_AFTER = 1000  # collections of young objects: some hours at 100 changes a second


@contextmanager
def startup() -> Iterator[None]:
    """Disable collections until ``end_startup``, or until the end of the block."""
    _set_allocator()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def end_startup() -> None:
    """Freeze all existing objects: they are never checked again. Later calls do nothing."""
    if not gc.isenabled():
        gc.collect()
        _return_freed_memory()
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], _FULL_AFTER)
        gc.enable()


def _set_allocator() -> None:
    """Use one arena for all threads, and return large blocks to the kernel when they are freed.

    Otherwise each thread that reads the maps or a list leaves an arena of some megabytes, which is
    used again only by a thread that happens to get it: 4.7 MB for each checkpoint of the history.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt:
        mallopt(_ARENA_MAX, 1)
        mallopt(_MMAP_THRESHOLD, _LARGE)


def _return_freed_memory() -> None:
    """Return memory that glibc keeps after lists and programs (malloc_trim(3)), if it can."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim:
        trim(0)


class Agent:
    """One node's agent."""

    def __init__(
        self,
        inbox: Inbox,
        parts: Sequence[Part],
        take_turn: Callable[[], Turn],
        publish: Callable[[Mapping[str, Any]], None],
        turned: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``take_turn`` returns what was taken and written since its last call.

        ``publish`` takes fields of the status. ``turned`` is called after each turn while all is in
        force.
        """
        self.parts, self._take_turn = parts, take_turn
        self._publish_fields, self._turned, self._clock = publish, turned, clock
        self._last = Turn()
        self._last_status, self._status_due = -math.inf, math.inf
        self._inbox = inbox
        self.stopped = False
        self.failing_parts: dict[str, str] = {}
        self._rests_until: dict[Part, float] = {}  # of those that have failed
        self._takers: defaultdict[type, list[Part]] = defaultdict(list)
        for part in parts:
            for kind in part.takes:
                self._takers[kind].append(part)
        self._observers = [each for each in parts if type(each).observe is not Part.observe]
        self._timed = [each for each in parts if type(each).due is not Part.due]

    def run(self) -> None:
        """Run the loop until a Stop is taken.

        Raises CompileError, VerifierError or KernelError if no programs at all can serve,
        ConfigurationError for addresses that do not fit the Node, and NodeError for conntrack
        settings that cannot be set.
        """
        try:
            for part in self.parts:
                part.started()
            while not (self.stopped or self._last.fatal):
                self._turn()
        finally:
            stopping.run_all(*(part.ended for part in self.parts))
        if self._last.fatal:
            raise self._last.fatal

    def _turn(self) -> None:
        for message in self._wait():
            self._take(message)
        if self.stopped:
            return
        for part in self._timed:
            if self._due(part) <= (now := self._clock()):
                self._rests_until.pop(part, None)
                if not parts.attempt(part.name, part.turn):
                    self._rests_until[part] = now + stopping.RETRY_SECONDS
        self._last = turn = self._take_turn()
        for part in self._observers:
            parts.attempt(part.name, part.observe, turn)
        self._status_due = self._last_status + STATUS_PAUSE
        if self._status_due <= (now := self._clock()) or not turn.is_usual:
            self._last_status, self._status_due = now, math.inf
            parts.attempt("status", self._publish)
        if turn.serves:
            end_startup()
            self._turned()

    def _due(self, part: Part) -> float:
        return max(part.due, self._rests_until.get(part, -math.inf))

    def _wait(self) -> Iterator[object]:
        """Yield the messages in the inbox; wait for the first one until a part is due."""
        most = MOST_TAKING if self._last.attached else math.inf  # a start takes all first
        until = min(self._status_due, *map(self._due, self._timed))
        return self._inbox.waiting(max(until - self._clock(), 0.0), most)

    def _take(self, message: object) -> None:
        match message:
            case Together(events):
                for event in events:
                    self._take(event)
            case Call():
                message.answer()
            case PartStatus(part, error):
                self.failing_parts.pop(part, None)
                if error:
                    self.failing_parts[part] = error
            case Stop():
                self.stopped = True
            case _:
                for taker in self._takers[type(message)]:
                    taker.take(message)

    def _publish(self) -> None:
        fields: dict[str, Any] = {"failing_parts": dict(self.failing_parts)}
        for part in self.parts:
            fields |= part.status()
        self._publish_fields(fields)
