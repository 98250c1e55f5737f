# SPDX-License-Identifier: Apache-2.0
"""What all service ports that are in the maps have together."""

from collections import Counter

from ebpflb.plan.service_entries import NO_ENTRIES, ServiceEntries


class Totals:
    """Counted as they change, so that nobody goes through all of them.

    ``schedulers``: by the scheduler in force, how many service ports; ``weighted``: how many go by
    weights that differ.
    """

    def __init__(self) -> None:
        self.backends = 0
        self.schedulers = Counter[str]()
        self.weighted = 0

    def replace(self, old: ServiceEntries, new: ServiceEntries) -> None:
        """What one had, and has now; NO_ENTRIES where it was not there, or has gone."""
        self.backends += len(new.backends) - len(old.backends)
        for entries, one in ((old, -1), (new, 1)):
            if entries is not NO_ENTRIES:
                self.schedulers[entries.scheduler] += one
                self.weighted += one * entries.is_weighted
