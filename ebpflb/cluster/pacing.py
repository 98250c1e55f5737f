# SPDX-License-Identifier: Apache-2.0
"""How patient a source is: every wait in one place, so that a test can make them all short."""

import random
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """All times in seconds; ``chance`` gives the jitter, uniform in [0, 1)."""

    first: float = 0.25  # pauses after failures: up to 0.25, 0.5, 1, 2, ... 30
    cap: float = 30.0
    answer: float = 30.0  # the longest silence while a request is answered
    watch: float = 300.0  # a watch is asked to last this to twice this, as client-go does
    grace: float = 15.0  # silence beyond the watch's end that means a dead connection
    absent: float = 300.0  # an older server may be replaced by one that has the resource
    rescan: float = 30.0  # a directory is looked at this often even if inotify is silent
    chance: Callable[[], float] = random.random

    def watch_seconds(self) -> int:
        """How long the next watch shall last: spread, so that nodes do not reconnect together."""
        return max(1, int(self.watch * (1 + self.chance())))


class Backoff:
    """Pauses that double up to the cap, each between half and all of its length."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._length = pace.first

    def next(self) -> float:
        """The pause after one more failure, in seconds."""
        pause = self._length * (1 + self._pace.chance()) / 2
        self._length = min(self._length * 2, self._pace.cap)
        return pause

    def reset(self) -> None:
        """Something succeeded: the next pause is the first one again."""
        self._length = self._pace.first
