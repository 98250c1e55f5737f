# SPDX-License-Identifier: Apache-2.0
"""The Services that are still to be planned: a few steps at a time, of each namespace in turn.

A Service with many ports, or a namespace with many changes, so takes its turns beside the others,
and no other namespace's change waits for more than a slice.
"""

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from ebpflb.model.events import Key
from ebpflb.model.services import PortName
from ebpflb.plan.desired_service import DesiredService

SLICE_COST = 1024  # of the steps that are planned and written at once: some 10 ms


class Step(NamedTuple):
    """A part of the work for one Service.

    ``desired``: what a service port is to be from now on; None: it is deleted. Without a ``name``
    the step has only prepared a later one. ``cost`` is about 10 µs for each.
    """

    cost: int
    name: PortName | None = None
    desired: DesiredService | None = None


class _Queue:
    """Of one namespace: the Services that wait, and the one whose steps are being taken."""

    def __init__(self) -> None:
        self.waiting: dict[Key, None] = {}
        self.current: tuple[Key, Iterator[Step]] | None = None

    def __bool__(self) -> bool:
        return bool(self.waiting) or self.current is not None

    def step(self, begin: Callable[[Key], Iterator[Step]]) -> Step | None:
        if self.current is None:
            key = next(iter(self.waiting))
            del self.waiting[key]
            self.current = key, begin(key)
        step = next(self.current[1], None)
        if step is None:
            self.current = None
        return step


class Backlog:
    """``begin`` returns the steps of a Service. What changes meanwhile is planned once more when
    they have been taken.
    """

    def __init__(self, begin: Callable[[Key], Iterator[Step]]) -> None:
        self._begin = begin
        self._queues: dict[str, _Queue] = {}  # by namespace, in the order of their turns

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __contains__(self, key: Key) -> bool:
        queue = self._queues.get(key.namespace)
        if queue is None:
            return False
        return key in queue.waiting or (queue.current is not None and queue.current[0] == key)

    def add(self, keys: Collection[Key]) -> None:
        for key in sorted(keys):
            self._queues.setdefault(key.namespace, _Queue()).waiting[key] = None

    def take_slice(self) -> dict[PortName, DesiredService | None]:
        """What the next steps want of service ports; it is to be planned before the next call."""
        changes: dict[PortName, DesiredService | None] = {}
        cost = 0
        while self._queues and cost < SLICE_COST:
            namespace, queue = next(iter(self._queues.items()))
            step = queue.step(self._begin)
            del self._queues[namespace]
            if queue:
                self._queues[namespace] = queue
            if step:
                cost += step.cost
                changes |= {step.name: step.desired} if step.name else {}
        return changes
