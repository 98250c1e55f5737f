# SPDX-License-Identifier: Apache-2.0
"""A clock that a test sets."""


class Clock:
    """A clock that is called like ``time.monotonic``; each call takes ``step`` seconds."""

    def __init__(self, now: float = 0.0, step: float = 0.0) -> None:
        self.now, self.step = now, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now
