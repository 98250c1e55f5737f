# SPDX-License-Identifier: Apache-2.0
"""A search that is to be made, and how several become one."""

from enum import Enum, auto
from typing import NamedTuple

from ebpflb.stale_udp.removed_backends import RemovedBackends


class SearchKind(Enum):
    """FIRST and SECOND follow a change; RENEWAL keeps rebound flows from being swept."""

    FIRST = auto()
    SECOND = auto()
    RENEWAL = auto()


class StaleSearch(NamedTuple):
    """When to search, and for what; ``everything``: without a look at the counters of backends."""

    due: float
    kind: SearchKind
    removed: RemovedBackends
    everything: bool

    def __or__(self, later: "StaleSearch") -> "StaleSearch":
        """Both as one, when the later one is due."""
        everything = self.everything or later.everything
        return later._replace(removed=self.removed | later.removed, everything=everything)
