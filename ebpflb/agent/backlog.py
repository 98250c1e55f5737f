# SPDX-License-Identifier: Apache-2.0
"""The Services that remain to be planned, in the order in which namespaces have their turns.

No namespace delays another one for longer than a slice. A namespace that has waited for nothing
comes first, as a sparse flow does in fq_codel: its change is in the next slice, however many
namespaces have much to do. Those take turns, a step each.

What is repeated without end is limited too. A namespace that has used its ``BURST`` of processor
time begins no other Service until ``RATE`` of the time since then makes up for it; the changes of a
Service that come meanwhile are planned together, once.
"""

import math
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from heapq import heappop, heappush
from typing import NamedTuple

from ebpflb.model.events import Key
from ebpflb.model.services import PortName
from ebpflb.plan.desired import DesiredService

SLICE_COST = 1024  # cost of steps that are planned and written at once: at most some 10 ms
BURST = 3.0  # seconds of processor time: all Services of a large cluster, planned again
RATE = 0.25  # of a processor, for one namespace

Changes = Mapping[PortName, DesiredService | None]
NO_CHANGES: Changes = {}


class Step(NamedTuple):
    """A part of the work for one Service.

    ``changes`` are the new states of service ports, for one plan; None: it is deleted. A step
    without changes has only prepared a later one. ``cost`` is in units of about 10 µs.
    """

    cost: int
    changes: Changes = NO_CHANGES


class Budget:
    """The processor time that each namespace has used. ``clock`` is monotonic, in seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._even: dict[str, float] = {}  # namespace -> when all that it used is made up for

    def spend(self, namespace: str, seconds: float) -> None:
        now, even = self._clock(), self._even
        even[namespace] = max(now, even.pop(namespace, now)) + seconds / RATE
        while even and even[oldest := next(iter(even))] <= now:
            del even[oldest]

    def held_until(self, namespace: str) -> float:
        """When the namespace may begin another Service."""
        return self._even.get(namespace, -math.inf) - BURST / RATE


class _Queue:
    """One namespace's waiting Services, and the one whose steps are being taken."""

    def __init__(self) -> None:
        self.waiting: dict[Key, None] = {}
        self.current: tuple[Key, Iterator[Step]] | None = None
        self.next: Step | None = None  # of the current Service, left to the next slice

    def __bool__(self) -> bool:
        return bool(self.waiting) or self.current is not None

    def step(self, begin: Callable[[Key], Iterator[Step]]) -> Step | None:
        """Take the next step; None at the end of a Service."""
        if step := self.next:
            self.next = None
            return step
        if self.current is None:
            key = next(iter(self.waiting))
            del self.waiting[key]
            self.current = key, begin(key)
        step = next(self.current[1], None)
        if step is None:
            self.current = None
        return step


class Backlog:
    """The waiting Services.

    ``begin`` returns the steps of a Service. A Service that changes meanwhile is planned once more
    after its steps have been taken. ``most`` is the cost of a slice.
    """

    def __init__(
        self, begin: Callable[[Key], Iterator[Step]], budget: Budget, most: float = SLICE_COST
    ) -> None:
        self._begin, self._budget, self._most = begin, budget, most
        self._queues: dict[str, _Queue] = {}
        self._sparse: dict[str, None] = {}  # namespaces that had nothing to do, in their order
        self._busy: dict[str, None] = {}  # the others; one may have become empty
        self._held: list[tuple[float, str]] = []  # until when, a heap
        self._costs: Counter[str] = Counter()  # of the last slice, by namespace

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __contains__(self, key: Key) -> bool:
        queue = self._queues.get(key.namespace)
        if queue is None:
            return False
        return key in queue.waiting or (queue.current is not None and queue.current[0] == key)

    @property
    def namespaces(self) -> Collection[str]:
        """The namespaces that have waiting Services; some may have none any more."""
        return self._queues.keys()

    @property
    def due(self) -> float:
        """When ``take_slice`` returns something next, by the budget's clock."""
        if self._sparse or self._busy:
            return -math.inf
        return self._held[0][0] if self._held else math.inf

    def add(self, keys: Collection[Key]) -> None:
        for key in sorted(keys):
            queue = self._queues.get(key.namespace)
            if queue is None:
                queue = self._queues[key.namespace] = _Queue()
                self._sparse[key.namespace] = None
            queue.waiting[key] = None

    def take_slice(self, now: float) -> dict[PortName, DesiredService | None]:
        """Return the next steps' changes; they must be planned before the next call.

        A step that is larger than a slice begins the next one, so that no other change waits for it
        to be written. The end of a Service is no step, and does not cost a turn.
        """
        while self._held and self._held[0][0] <= now:
            self._busy[heappop(self._held)[1]] = None
        changes: dict[PortName, DesiredService | None] = {}
        self._costs.clear()
        while self._costs.total() < self._most and (namespace := self._next(now)) is not None:
            queue = self._queues[namespace]
            step = queue.step(self._begin)
            if step and step.cost > self._most and changes:
                queue.next = step
                break
            if step or not queue:
                self._sparse.pop(namespace, None)
                self._busy.pop(namespace, None)
                self._busy[namespace] = None  # empty or not: it is not sparse before its next turn
            self._costs[namespace] += step.cost if step else 1
            changes |= step.changes if step else {}
        self._forget_empty()
        return changes

    def spent(self, seconds: float) -> None:
        """Note the processor time that the last slice has taken, with its plan and its writes."""
        total = self._costs.total()
        for namespace, cost in self._costs.items():
            self._budget.spend(namespace, seconds * cost / total)

    def _next(self, now: float) -> str | None:
        """Return the namespace whose turn it is; None if each is done or held."""
        for turns in (self._sparse, self._busy):
            while turns:
                namespace = next(iter(turns))
                queue, until = self._queues[namespace], self._budget.held_until(namespace)
                if queue.current or (queue and until <= now):
                    return namespace
                del turns[namespace]
                if queue:
                    heappush(self._held, (until, namespace))
                else:
                    del self._queues[namespace]
        return None

    def _forget_empty(self) -> None:
        """Forget the namespaces that would have the next turns, and have nothing to do."""
        while self._busy and not self._queues[namespace := next(iter(self._busy))]:
            del self._busy[namespace], self._queues[namespace]
