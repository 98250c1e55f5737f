# SPDX-License-Identifier: Apache-2.0
"""The log's lines about what was planned and written.

The first plan after a quiet second has a line at once. Those that follow within a second of a line
share the next one: under many changes a line for each costs more than its plan.
"""

import logging
import math
import time
from collections.abc import Callable

from ebpflb.plan.plan import Plan

log = logging.getLogger(__name__)

LOG_LINE_SECONDS = 1.0  # from one line to the next


class WriteLog:
    """``clock`` is a monotonic one, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = clock()
        self._begin()

    def _begin(self) -> None:
        self._plans = self._frontends = self._frontends_removed = self._slots = self._removed = 0
        self._planning = self._writing = 0.0  # seconds

    @property
    def due(self) -> float:
        """When ``turn`` has a line to log, by the clock; infinity where it has none."""
        return self._next if self._plans else math.inf

    def wrote(self, plan: Plan, planning: float, writing: float) -> None:
        """A plan is in the maps; it took so many seconds to make, and to write."""
        self._plans += 1
        self._frontends += len(plan.services)
        self._frontends_removed += len(plan.removed_services)
        self._slots += len(plan.slots)
        self._removed += len(plan.removed_backend_names)
        self._planning += planning
        self._writing += writing

    def turn(self) -> None:
        """Logs what was written since the last line, if that is a second ago."""
        if self._plans and self._clock() >= self._next:
            plans = "plan" if self._plans == 1 else f"{self._plans} plans"
            log.info(
                "%s: frontends ~%d -%d, slots ~%d, backends -%d; made in %.1f ms, "
                "written in %.1f ms",
                *(plans, self._frontends, self._frontends_removed, self._slots, self._removed),
                *(1e3 * self._planning, 1e3 * self._writing),
            )
            self._begin()
            self._next = self._clock() + LOG_LINE_SECONDS
