# SPDX-License-Identifier: Apache-2.0
"""Whether the agent's loop runs, and in time.

The agent answers this without waiting for the loop.
"""

from collections.abc import Iterator

import msgspec

STALLED_SECONDS = 30.0  # without a turn of the loop, until the node is not ready
DEAD_SECONDS = 60.0  # without a turn of the loop, until the agent is to be restarted
LATE_SECONDS = 10.0  # that a message waits for the loop, until this is reported


class Pulse(msgspec.Struct, frozen=True):
    """The loop's state.

    ``silent``: seconds since the loop's last turn, 0 while the agent starts. ``waiting``: seconds
    that the oldest message has waited for the loop.
    """

    silent: float = 0.0
    waiting: float = 0.0

    @property
    def stalled(self) -> Iterator[str]:
        """Yield a sentence if the loop does not run."""
        if self.silent >= STALLED_SECONDS:
            yield f"the agent's loop has not run for {self.silent:.0f} s"

    @property
    def late(self) -> Iterator[str]:
        """Yield a sentence if changes wait."""
        if self.waiting >= LATE_SECONDS:
            yield f"changes are applied late: the oldest has waited for {self.waiting:.0f} s"
