# SPDX-License-Identifier: Apache-2.0
"""The audit: what is in the kernel is compared with what is planned, and what differs is put back.

It runs in the agent's loop, so nothing changes the plan while it compares. Each check is a sequence
of small steps; a turn takes as many as fit into BUDGET_SECONDS, then messages are handled, and the
check goes on PAUSE_SECONDS later. What a turn finds is put back in the same turn. Then the check is
repeated at once: it ends what is reported as drift, if nothing differs any more.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from ebpflb.errors import EbpflbError, in_words
from ebpflb.model import drift
from ebpflb.model.drift import Drift

log = logging.getLogger(__name__)

BUDGET_SECONDS = 0.01  # of one turn of the loop
PAUSE_SECONDS = 0.1  # until the next turn goes on
IMPOSSIBLE_SECONDS = 1.0  # until it is asked again whether a check is possible
FIRST_RETRY = 1.0  # seconds after a failure; each further one doubles them, up to the period
SHARE = 20  # a check that takes a second is not begun again for this many


class AuditCheck(Protocol):
    """One thing to be compared."""

    name: str

    @property
    def period(self) -> float:
        """Seconds from one comparison to the next."""

    @property
    def possible(self) -> bool:
        """Whether there is anything planned now that could be compared."""

    def steps(self) -> Iterator[Iterable[Drift] | None]:
        """What differs, in steps of about a millisecond; None: it has to wait for something.

        Raises EbpflbError or OSError.
        """

    def repair(self) -> None:
        """Puts back what the steps since the last call have found. Raises EbpflbError, OSError."""


OnDrift = Callable[[list[Drift]], None]
"""Receives what a turn has found and what the turns before had not."""


class RepeatedCheck:
    """One check, again and again.

    ``drift`` is what the last comparison found; what is found meanwhile is added to it.
    """

    def __init__(
        self, check: AuditCheck, on_drift: OnDrift, *, report_only: bool, clock: Callable[[], float]
    ) -> None:
        self.check = check
        self.drift: list[Drift] = []
        self.error: str | None = None  # why the last comparison, or putting back, has failed
        self.completed = 0  # comparisons
        self.due = clock()
        self._on_drift, self._report_only, self._clock = on_drift, report_only, clock
        self._steps: Iterator[Iterable[Drift] | None] | None = None
        self._found: list[Drift] = []
        self._spent = 0.0
        self._ended = -math.inf
        self._is_repeated = False
        self._retry = FIRST_RETRY

    def wake(self) -> None:
        """The next comparison is due now, but for what the last one took of the time."""
        rested = self._ended + SHARE * self._spent
        self.due = min(self.due, max(self._clock(), rested))

    def turn(self) -> None:
        if not self.check.possible:
            self._steps, self.due = None, self._clock() + IMPOSSIBLE_SECONDS
            return
        begun = self._clock()
        try:
            found, ended = self._compare(begun)
            self._handle(found)
        except (EbpflbError, OSError) as error:
            self._fail(error)
            return
        self._spent += self._clock() - begun
        if ended:
            self._complete()
        else:
            self.due = self._clock() + PAUSE_SECONDS

    def _compare(self, begun: float) -> tuple[list[Drift], bool]:
        """What the steps of one turn find, and whether the last one was among them."""
        if self._steps is None:
            self._steps, self._found, self._spent = self.check.steps(), [], 0.0
        found: list[Drift] = []
        for drifts in self._steps:
            if drifts is None:
                return found, False
            found += drifts
            if self._clock() - begun > BUDGET_SECONDS:
                return found, False
        return found, True

    def _handle(self, found: list[Drift]) -> None:
        if not found:
            return
        new = [each for each in found if each not in self.drift]
        self._found += found
        self.drift += new
        if new:
            verb = "found" if self._report_only else "found, and is put back"
            log.warning("audit: %s: %s", verb, drift.summary(new))
            self._on_drift(new)
        if not self._report_only:
            self.check.repair()

    def _complete(self) -> None:
        """After something was put back the next comparison begins at once, but only once."""
        if self.drift and not self._found:
            log.info("audit: the %s are as planned again", self.check.name)
        self.drift, self.error, self._steps = self._found, None, None
        self._retry = FIRST_RETRY
        self.completed, self._ended = self.completed + 1, self._clock()
        self._is_repeated = bool(self._found) and not self._report_only and not self._is_repeated
        rest = 0.0 if self._is_repeated else max(self.check.period, SHARE * self._spent)
        self.due = self._clock() + rest

    def _fail(self, error: EbpflbError | OSError) -> None:
        reason = in_words(error)
        if reason != self.error:
            log.error("audit: the %s: %s", self.check.name, reason)
        self.error, self._steps, self._is_repeated = reason, None, False
        self.due = self._clock() + min(self._retry, self.check.period)
        self._retry = min(2 * self._retry, self.check.period)


class Audit:
    """All checks. ``turn`` is called by the loop, in each of its turns."""

    def __init__(
        self,
        checks: Sequence[AuditCheck],
        on_drift: OnDrift,
        *,
        report_only: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``report_only``: nothing is put back. ``clock`` is a monotonic one, in seconds."""
        self.passes = {
            check.name: RepeatedCheck(check, on_drift, report_only=report_only, clock=clock)
            for check in checks
        }
        self._clock = clock

    @property
    def due(self) -> float:
        """When ``turn`` has something to do, by the clock."""
        return min(each.due for each in self.passes.values())

    def wake(self, check: str) -> None:
        """Something of what this check compares may be gone."""
        if check in self.passes:
            self.passes[check].wake()

    def turn(self) -> None:
        for each in self.passes.values():
            if each.due <= self._clock():
                each.turn()

    @property
    def drift(self) -> list[Drift]:
        """What differs, as far as is known."""
        return [found for each in self.passes.values() for found in each.drift]

    @property
    def errors(self) -> dict[str, str]:
        """Check -> why it cannot compare, or not put back what it found."""
        return {name: each.error for name, each in self.passes.items() if each.error}
