# SPDX-License-Identifier: Apache-2.0
"""Which places of map choices a service port's tables have, and who waits for some.

Where slots or weights change a service port gets other places, and its former ones are free after
their quarantine, as with slots. Where map choices is full its table is overwritten, place by place:
each place leads to one of the former slots or of the new ones, which all are the service port's and
in the same list, so old readers find what they may find. A crash in between leaves a mixture of the
two, which the next agent finds and overwrites (``MapContents.wrong_tables``).
"""

from collections.abc import Mapping
from itertools import chain, islice

from ebpflb.model.services import PortName
from ebpflb.plan import scheduling, tables
from ebpflb.plan.allocators import MapFull, SlotAllocator
from ebpflb.plan.desired_service import DesiredService
from ebpflb.plan.entries import NO_TABLE, Flags, Frontend, Range
from ebpflb.plan.service_entries import LISTS, ServiceEntries, in_list

MOST_TRIED = 16  # in a plan, of the service ports that want a table
PLACES_KEPT = 64  # one in so many places is kept for those that have a table and want another one


class TableSpace:
    """The allocator of map choices, which has so many places.

    ``without_table``: the service ports whose table does not fit; they are served at random.
    ``cramped``: those that have a table, but not of the size that is right for them.
    ``wrong``: those whose places are to be overwritten, whatever else changes.
    """

    def __init__(self, capacity: int) -> None:
        self.kept = capacity // PLACES_KEPT
        self.choices = SlotAllocator(capacity, "choices")
        # in the order in which they are tried again
        self.without_table: dict[PortName, None] = {}
        self.cramped: dict[PortName, None] = {}
        self.wrong: set[PortName] = set()

    def allocate(
        self,
        desired: DesiredService,
        frontends: Mapping[Frontend, Flags],
        old: ServiceEntries,
        *,
        same_block: bool,
    ) -> tuple[Mapping[Frontend, Flags], Range]:
        """The first of its tables, that which it has if it still is right; NO_TABLE: it needs none.

        Where no other fits that which it has is to be overwritten, if it is not too small. Else
        connections go at random, whatever the weights: then the frontends are others, and it is in
        ``without_table``.
        """
        self.without_table.pop(desired.name, None)
        self.cramped.pop(desired.name, None)
        scheduler = scheduling.scheduler_of(next(iter(frontends.values()), frozenset()))
        if tables.is_needless(scheduler, [each.weight for each in desired.backends]):
            return frontends, NO_TABLE
        lists = [in_list(desired.backends, name) for name in LISTS]
        size = tables.size(scheduler, lists)
        if not size:
            return frontends, NO_TABLE
        had = old.valid.table if old.valid else NO_TABLE
        if same_block and (old.scheduler, had.size) == (scheduler, size):
            return frontends, had
        try:
            return frontends, self._new(size, is_first=not had.size)
        except MapFull:
            if tables.fits(scheduler, lists, had.size):
                self.cramped |= {desired.name: None} if had.size != size else {}
                return frontends, had
            self.without_table[desired.name] = None
            plain = {f: scheduling.at_random(flags) for f, flags in frontends.items()}
            return plain, NO_TABLE

    def _new(self, size: int, *, is_first: bool) -> Range:
        if is_first and self.choices.available - 2 * size < self.kept:
            raise MapFull("map choices is full")
        return self.choices.allocate(2 * size)._replace(size=size)

    def take_wrong(self, name: PortName) -> bool:
        """Whether it was in ``wrong``: its places are written now."""
        found = name in self.wrong
        self.wrong.discard(name)
        return found

    def take_waiting(self) -> set[PortName]:
        """Some that want a table, to be tried again: thousands would make each plan slow."""
        found = set(islice(chain(self.without_table, self.cramped), MOST_TRIED))
        for name in found:
            self.without_table.pop(name, None)
            self.cramped.pop(name, None)
        return found
