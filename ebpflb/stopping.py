# SPDX-License-Identifier: Apache-2.0
"""The consequences when a part of the agent fails, and the steps that end the agent."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ebpflb.errors import EbpflbError, in_words
from ebpflb.model.events import PartStatus
from ebpflb.redaction import redact

log = logging.getLogger(__name__)


def run_all(*steps: Callable[[], object], failed: str = "stopping") -> None:
    """Run all steps in order; if one raises, log ``failed`` with the reason and go on."""
    for step in steps:
        try:
            step()
        except (EbpflbError, OSError) as error:
            log.error("%s: %s", failed, in_words(error))
        except Exception:
            log.exception("%s: unexpected", failed)


END_AFTER = 60.0  # seconds of failures without a success, after which the agent ends
END_EVERY = 600.0  # seconds: the agent ends for a part at most once in this time
RETRY_SECONDS = 1.0  # until a part is tried again that has no times of its own


class Parts:
    """The parts of this process that fail by an unexpected exception (a bug).

    A part that fails must not stop the others: it is tried again, and is a condition of the agent
    (serve/conditions.py) until it succeeds. If it fails for END_AFTER the agent ends, because a new
    process may not have the fault. A command has no agent, so its failures are only logged.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` is a monotonic clock, in seconds."""
        self.ended_for = ""  # the part for which the agent ends
        self._clock, self._lock = clock, threading.Lock()
        self._failing: dict[str, tuple[float, str]] = {}  # part -> since when, the last error
        self._emit: Callable[[PartStatus], None] = lambda status: None
        self._stop: Callable[[], None] = lambda: None
        self._record: Path | None = None

    def connect(
        self, emit: Callable[[PartStatus], None], stop: Callable[[], None], record: Path
    ) -> None:
        """Report to a new agent from now on.

        ``stop`` ends the agent. The modification time of ``record`` says when an agent last ended
        because of a part.
        """
        self.ended_for, self._failing = "", {}
        self._emit, self._stop, self._record = emit, stop, record

    def attempt(self, part: str, turn: Callable[..., object], *arguments: object) -> bool:
        """Call ``turn``; return whether it succeeded."""
        try:
            turn(*arguments)
        except Exception as error:
            self.failed(part, error)
            return False
        if part in self._failing:
            self.succeeded(part)
        return True

    def failed(self, part: str, error: BaseException) -> None:
        """Note an unexpected exception: the part will be tried again."""
        text, now = redact(f"{type(error).__name__}: {in_words(error)}"), self._clock()
        with self._lock:
            since, former = self._failing.get(part, (now, ""))
            self._failing[part] = since, text
        if text != former:
            log.error("part %s failed: %s", part, text, exc_info=error)
            self._emit(PartStatus(part, text))
        if now - since >= END_AFTER:
            self._end(part)

    def is_failing(self, part: str) -> bool:
        return part in self._failing

    def succeeded(self, part: str) -> None:
        if part in self._failing:
            with self._lock:
                self._failing.pop(part, None)
            log.warning("part %s works again", part)
            self._emit(PartStatus(part, None))

    def thread_ended(self, failure: threading.ExceptHookArgs) -> None:
        """Handle a failed thread, as threading.excepthook: only a new agent starts it again."""
        part = failure.thread.name if failure.thread else "unknown"
        self.failed(part, failure.exc_value or failure.exc_type())
        self._end(part)

    def _end(self, part: str) -> None:
        """End the agent, unless one has ended because of a part a short time ago."""
        with self._lock:
            if self.ended_for or self._record is None or not _may_end(self._record):
                return
            self.ended_for = part
        log.critical("part %s keeps failing, so the agent exits, to be restarted", part)
        self._stop()


def _may_end(record: Path) -> bool:
    """Return whether the last agent that ended for a part did so long enough ago; if so, record
    this end.
    """
    try:
        if record.exists() and 0 <= time.time() - record.stat().st_mtime < END_EVERY:
            return False
        record.touch()
    except OSError as error:  # the next agent would not know of this end
        log.error("the agent does not exit: %s", in_words(error))
        return False
    return True


parts = Parts()
