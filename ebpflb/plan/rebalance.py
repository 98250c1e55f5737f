# SPDX-License-Identifier: Apache-2.0
"""How many connections of this node leave each endpoint after a scale-up (ebpflb.io/rebalance).

Each node sees only its own connections. Drawn at random they are never even; so a movement begins
with a new endpoint, ends no more connections than were open then, and is over after a time.
"""

import math
from collections.abc import Mapping, Set

LONGEST = 1800.0  # seconds of a movement, from the last new endpoint on
PART_A_SECOND = 0.02  # of a service port's connections; at least one


def excess(counts: Mapping[int, int], weights: Mapping[int, int], above: float) -> dict[int, int]:
    """Return how many connections each endpoint has beyond its share, if that is ``above`` it.

    ``counts`` are open connections and ``weights`` those of endpoints that get new ones, by id. No
    endpoint has any if there is one, or if there are fewer connections than endpoints.
    """
    total, weight = sum(counts.get(id, 0) for id in weights), sum(weights.values())
    if len(weights) < 2 or total < len(weights):
        return {}
    found = {}
    for id, its in weights.items():
        count, share = counts.get(id, 0), total * its / weight
        if count > share * (1 + above) and count >= share + 1:
            found[id] = math.floor(count - share)
    return found


class Movement:
    """The movement of one service port's connections.

    ``is_new``: the Service, or its annotation, came while the agent ran: all endpoints are new. An
    agent that starts does not know which ones are, so nothing moves.
    """

    def __init__(self, *, is_new: bool) -> None:
        self._known: Set[int] | None = set() if is_new else None
        self._until = -math.inf
        self._left: int | None = 0  # how many it may still end; None: it has ended none yet

    def look(self, ids: Set[int], now: float) -> bool:
        """Note the endpoints' ids; return whether connections move now."""
        if self._known is not None and ids - self._known:
            self._until, self._left = now + LONGEST, None
        self._known = {*ids}
        return self._left != 0 and now < self._until

    def most(self, beyond: Mapping[int, int], counts: Mapping[int, int]) -> int:
        """Return how many may end in this second, of those ``beyond`` their shares."""
        total = sum(counts.get(id, 0) for id in self._known or ())
        if self._left is None:
            self._left = total
        return min(sum(beyond.values()), self._left, math.ceil(total * PART_A_SECOND))

    def ended(self, count: int) -> None:
        self._left = max(0, (self._left or 0) - count)

    def stop(self) -> None:
        """Move nothing until there is another new endpoint."""
        self._left = 0
