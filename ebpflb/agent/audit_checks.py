# SPDX-License-Identifier: Apache-2.0
"""What the agent's audit compares."""

import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ebpflb.agent.node_sync import NodeSync
from ebpflb.agent.service_sync import ServiceSync
from ebpflb.datapath.datapath import Datapath
from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.model.drift import Drift
from ebpflb.plan import comparison
from ebpflb.plan.comparison import Wrong
from ebpflb.serve.agent_lock import AgentLock

log = logging.getLogger(__name__)

MAP_PERIODS = 4  # sync periods from one comparison of the maps to the next
_ENTRIES_A_STEP = 256  # entries in one step
_HASHES = ("services", "service_names", "backend_names", "cluster_ips")
HOOKS_AND_PINS = "hooks and pins"
HOOK_SECONDS = 2.0  # from one look at hooks and devices to the next, at the longest


class HooksCheck:
    """Every link, filter and pin: attached, ours, and there; and the state directory is ours."""

    name = HOOKS_AND_PINS

    def __init__(self, node_sync: NodeSync, lock: AgentLock, end: Callable[[], None]) -> None:
        """``end`` ends the agent: another one has the state directory now."""
        self._node_sync, self._lock, self._end = node_sync, lock, end
        self.period = min(HOOK_SECONDS, node_sync.options.sync_period)

    @property
    def possible(self) -> bool:
        return self._node_sync.attached

    def steps(self) -> Iterator[Iterable[Drift]]:
        yield self._lock.faults()
        yield from self._node_sync.faults()

    def repair(self) -> None:
        if self._lock.restore():
            self._node_sync.restore()
        else:
            log.error("another agent serves %s now: ending", self._node_sync.options.paths.state)
            self._end()


class MapsCheck:
    """Every entry of the maps that the agent writes."""

    name = "maps"

    def __init__(self, datapath: Datapath, node_sync: NodeSync, service_sync: ServiceSync) -> None:
        self._datapath, self._node_sync, self._service_sync = datapath, node_sync, service_sync
        self.period = MAP_PERIODS * node_sync.options.sync_period
        self._wrong: list[Wrong] = []
        self._node_differs = False

    @property
    def possible(self) -> bool:
        return self._service_sync.complete and not self._node_sync.changed

    def steps(self) -> Iterator[Iterable[Drift]]:
        """Ends where the services are planned anew from what the maps hold."""
        planner = self._service_sync.planner
        self._wrong, self._node_differs = [], False
        yield from self._node()
        for wrong in self._services():
            if self._service_sync.planner is not planner:
                return
            self._wrong += wrong
            yield [each.drift for each in wrong]

    def repair(self) -> None:
        wrong, self._wrong = self._wrong, []
        if self._node_differs:
            self._node_differs = False
            self._node_sync.repair(self._service_sync.cover_service_cidrs())
        if wrong:
            self._datapath.apply(comparison.corrections(wrong))

    def _node(self) -> Iterator[list[Drift]]:
        for drifts in self._node_sync.differences(self._service_sync.cover_service_cidrs):
            self._node_differs |= bool(drifts)
            yield drifts

    def _services(self) -> Iterator[list[Wrong]]:
        """Forwards by what is planned, then backwards by what is there."""
        planner, maps = self._service_sync.planner, self._datapath.maps
        read = {name: opened.get for name, opened in maps.items()}
        for port in list(planner.actual):
            for wrong in comparison.compare_service(planner, port, read):
                yield [wrong] if wrong else []
        for name in _HASHES:
            for keys, _ in maps[name].slices(_ENTRIES_A_STEP):
                yield list(comparison.surplus(planner, name, _unpacked(maps[name], keys)))
        yield from self._source_ranges()
        slots = maps["backend_slots"]
        for first in range(0, slots.spec.entries, _ENTRIES_A_STEP):
            ids = range(first, min(first + _ENTRIES_A_STEP, slots.spec.entries))
            yield list(comparison.removed_backends(planner, ((id, slots.get(id)) for id in ids)))

    def _source_ranges(self) -> Iterator[list[Wrong]]:
        """A look-up would find a shorter prefix, so what is missing is known when all is read."""
        planner, opened = self._service_sync.planner, self._datapath.maps["source_ranges"]
        planned, seen = planner.source_ranges.snapshot(), set[object]()
        for packed_keys, packed_values in opened.slices(_ENTRIES_A_STEP):
            found: dict[Any, int] = dict(opened.unpacked(packed_keys, packed_values))
            seen |= found.keys()
            yield list(comparison.present_source_ranges(planner, found))
        for first in range(0, len(planned.ranges), _ENTRIES_A_STEP):
            part = planned._replace(ranges=planned.ranges[first : first + _ENTRIES_A_STEP])
            yield list(comparison.missing_source_ranges(planner, part, seen))


def _unpacked(opened: Map, keys: bytes) -> list[object]:
    size = opened.spec.key_size
    return [opened.key.unpack(keys[at : at + size]) for at in range(0, len(keys), size)]
