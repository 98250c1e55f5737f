# SPDX-License-Identifier: Apache-2.0
"""How often something may be reported, so that no tenant fills the log or the API server."""

import time
from collections.abc import Callable, Hashable

MOST_KEYS = 4096  # remembered, as in client-go; the least recently used one is forgotten


class RateLimit:
    """For each key ``burst`` reports at once, and from then on one in ``seconds``."""

    def __init__(
        self, burst: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``clock`` is a monotonic one, in seconds."""
        self._spare, self._seconds, self._clock = (burst - 1) * seconds, seconds, clock
        self._paid_until: dict[Hashable, float] = {}  # each report pays for ``seconds``

    def allows(self, key: Hashable) -> bool:
        """Whether one more report about ``key`` may be made now; then it counts as made."""
        now = self._clock()
        paid_until = max(self._paid_until.pop(key, now), now)
        is_allowed = paid_until - now <= self._spare
        self._paid_until[key] = paid_until + self._seconds if is_allowed else paid_until
        if len(self._paid_until) > MOST_KEYS:
            del self._paid_until[next(iter(self._paid_until))]
        return is_allowed


def object_limit(clock: Callable[[], float] = time.monotonic) -> RateLimit:
    """The limit for each object: client-go's for its events."""
    return RateLimit(25, 300.0, clock)
