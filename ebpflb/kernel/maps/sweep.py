# SPDX-License-Identifier: Apache-2.0
"""The sweeper removes flows from their maps that have been idle for too long.

It runs in a thread and reads a map a slice at a time with pauses between, so it never delays the
agent. It first reads only the time of last use and the flags of each entry. If the flow may have
expired by these, it reads the flow's other entries and decides (entries/flows.py). A program
removes the flow (bpf/hooks/flow_end.c): a new connection may replace it at any moment.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache

from ebpflb.entries.flows import Expired, Flow, Timeouts, Tuple
from ebpflb.kernel.maps.bpf_map import Map, MappedArray
from ebpflb.kernel.maps.layout import MAPS, columns, ffi, names
from ebpflb.kernel.maps.records import EntryEnd, ExpiredEntry, Sweep, record
from ebpflb.model.services import Protocol
from ebpflb.workers import PeriodicWorker

log = logging.getLogger(__name__)

SWEEP_INTERVAL = 10.0  # seconds between two sweeps: the maximum delay of a removal
SWEEP_SLICE = 512  # entries: 0.2 ms, or some 30 ms if all of them are removed
SWEEP_PAUSE_FACTOR = 3.0  # pause / duration of its slice: a quarter of a CPU

# Map -> the protocols of its flows, in the order of the maps flow_stats and sweeps.
FLOW_MAPS = {"tcp_flows": (Protocol.TCP,), "other_flows": (Protocol.UDP, Protocol.SCTP)}

_FLAGS = names("flow_flag", "FLOW_")
_KNOWN = 2 * max(_FLAGS) - 1  # no program sets other flags
_KEY_SIZE, _VALUE_SIZE = MAPS["tcp_flows"].key_size, MAPS["tcp_flows"].value_size
_FLAGS_AND_LAST_SEEN = columns("struct flow", flags="H", last_seen="Q")

# Takes entries in the form of bpf/hooks/flow_end.c; returns the numbers of deleted ones, as
# bits.
EndFlow = Callable[[bytes], int]
_EXPIRED_ENTRY = record("struct expired_entry")
_FLOW_SIZE = _EXPIRED_ENTRY.struct.size * ffi.typeof("enum flow_size").relements["FLOW_ENTRIES"]


@cache
def _idle_limits(timeouts: Timeouts, protocols: tuple[Protocol, ...]) -> list[int]:
    """Return flags -> the idle nanoseconds of an entry after which its flow may expire."""
    words = [
        frozenset(word for bit, word in _FLAGS.items() if bit & bits)
        for bits in range(2 * max(_FLAGS))
    ]
    return [min(timeouts.idle_limit(each, flags) for each in protocols) for flags in words]


class FlowTable:
    """One of the two maps of flows, with its counters."""

    def __init__(self, maps: Mapping[str, Map], name: str) -> None:
        self.name = name
        self.flows = maps[name]
        self.number = list(FLOW_MAPS).index(name)
        self._sweeps, self.stats = maps["sweeps"], maps["flow_stats"]

    @property
    def numbers(self) -> Sweep:
        """The numbers of entries swept and evicted so far, and of current entries."""
        numbers: Sweep = self._sweeps.get(self.number)
        return numbers

    def count(self, removed: int) -> None:
        """Add to the number of swept entries."""
        numbers = self.numbers
        self._sweeps.write([(self.number, numbers._replace(swept=numbers.swept + removed))])


class SweptTable(FlowTable):
    """A map of flows from which expired flows are removed.

    ``end_flow`` runs bpf/hooks/flow_end.c on entries and returns the program's result.
    """

    def __init__(
        self, maps: Mapping[str, Map], name: str, timeouts: Timeouts, end_flow: EndFlow
    ) -> None:
        super().__init__(maps, name)
        self._timeouts, self.end_flow = timeouts, end_flow
        self._by_flags = _idle_limits(timeouts, FLOW_MAPS[name])

    def sweep(self) -> Iterator[None]:
        """Go once through the map, a slice at each step; update the numbers at the end."""
        created, left = self.stats.get(self.number)[0], 0
        for keys, values in self.flows.slices(SWEEP_SLICE):
            left += self._sweep_slice(keys, values, time.monotonic_ns())
            yield
        self._update(created, left)

    def _sweep_slice(self, keys: bytes, values: bytes, now: int) -> int:
        """Sweep a slice; return the number of its entries that are left."""
        before = [now - timeout for timeout in self._by_flags]
        entries = enumerate(_FLAGS_AND_LAST_SEEN.iter_unpack(values))
        idle = [index for index, (flags, last) in entries if last <= before[flags & _KNOWN]]
        removed: set[Tuple] = set()
        for flow in self._timeouts.expired(
            self._read(idle, keys, values, removed), self.flows.get, now
        ):
            removed.update(self._end(flow))
        if not removed:
            return len(values) // _VALUE_SIZE
        here = {keys[at : at + _KEY_SIZE] for at in range(0, len(keys), _KEY_SIZE)}
        return len(here.difference(map(self.flows.key.pack, removed)))

    def _end(self, flow: Expired) -> list[Tuple]:
        """Remove an expired flow, unless it was used since it was read; return the deleted keys.

        The entries are counted as swept before they are deleted, so that after a kill the next
        agent does not count them as evicted.
        """
        rows = [
            ExpiredEntry(
                key, entry.last_seen, EntryEnd.RESTS if key == flow.resting else EntryEnd.DELETED
            )
            for key, entry in flow.entries.items()
        ]
        self.count(len(rows))
        bits = self.end_flow(b"".join(map(_EXPIRED_ENTRY.pack, rows)).ljust(_FLOW_SIZE, b"\0"))
        deleted = [row.tuple for bit, row in enumerate(rows) if bits >> bit & 1]
        if len(deleted) < len(rows):
            self.count(len(deleted) - len(rows))
        return deleted

    def _read(
        self, indexes: list[int], keys: bytes, values: bytes, removed: set[Tuple]
    ) -> Iterator[tuple[Tuple, Flow]]:
        """Yield these entries, without those that were removed with another entry of their flow."""
        for index in indexes:
            key = self.flows.key.unpack(keys[index * _KEY_SIZE : (index + 1) * _KEY_SIZE])
            if key not in removed:
                value = values[index * _VALUE_SIZE : (index + 1) * _VALUE_SIZE]
                yield key, self.flows.value.unpack(value)

    def _update(self, created: int, left: int) -> None:
        """Count as evicted the entries that were created and neither deleted, nor swept, nor left.

        Entries that were created or deleted during the sweep can hide evicted ones until the next
        sweep; no other entry is ever counted as evicted.
        """
        deleted, numbers = self.stats.get(self.number)[1], self.numbers
        evicted = max(numbers.evicted, created - deleted - numbers.swept - left)
        if evicted > numbers.evicted:
            newly = evicted - numbers.evicted
            log.warning(
                "%s is full: %d entries were evicted for newer ones, so their connections may "
                "break; raise --map-size flows=N",
                self.name,
                newly,
            )
        self._sweeps.write([(self.number, Sweep(numbers.swept, left, evicted))])


class Gate:
    """Tell the programs when there is no flow to look up (bpf/engine/flows/gate.h).

    A program may be between noting that it opens a flow and writing the flow's first entry. So the
    gate is closed only if no program is attached yet, or if two sweeps found nothing, and no flow
    was opened since before the first of them.
    """

    def __init__(self, maps: Mapping[str, Map]) -> None:
        gate = maps["flow_gate"]
        assert isinstance(gate, MappedArray)
        self._gate = gate
        self._tables = [maps[name] for name in FLOW_MAPS]
        self._found_empty: int | None = None  # `opened` before the last sweep, if it found nothing

    def opened(self) -> int:
        """Return the number of flows opened so far."""
        return int(self._gate.get(0).opened)

    @property
    def is_open(self) -> bool:
        """Whether the flow tables may hold a flow."""
        gate = self._gate.get(0)
        return bool(gate.empty != gate.opened + 1)

    def close_if_empty(self) -> None:
        """Close the gate if there is no flow; call this only while no program is attached."""
        if all(next(table.items(), None) is None for table in self._tables):
            self._gate.write_field(0, "empty", self.opened() + 1)

    def swept(self, opened: int, left: int) -> None:
        """Note the result of a sweep.

        ``opened`` is from before the sweep, ``left`` the number of entries that it found.
        """
        if left == 0 and self._found_empty == opened:
            self._gate.write_field(0, "empty", opened + 1)
        self._found_empty = None if left else opened


class Sweeper(PeriodicWorker):
    """Sweep both maps every SWEEP_INTERVAL from ``start`` to ``stop``."""

    def __init__(self, maps: Mapping[str, Map], timeouts: Timeouts, end_flow: EndFlow) -> None:
        super().__init__("sweep", SWEEP_INTERVAL, failing="sweeping flows failed", steady=True)
        self.tables = [SweptTable(maps, name, timeouts, end_flow) for name in FLOW_MAPS]
        self._gate = Gate(maps)
        self.pause = (
            SWEEP_INTERVAL * SWEEP_SLICE / sum(table.flows.spec.entries for table in self.tables)
        )

    def turn(self) -> None:
        """Sweep both maps with a pause after each slice; end early if stopped."""
        begun, opened = time.monotonic(), self._gate.opened()
        for _ in itertools.chain.from_iterable(table.sweep() for table in self.tables):
            if self.stopped.wait(max(self.pause, SWEEP_PAUSE_FACTOR * (time.monotonic() - begun))):
                return
            begun = time.monotonic()
        self._gate.swept(opened, sum(table.numbers.entries for table in self.tables))
