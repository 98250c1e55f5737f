# SPDX-License-Identifier: Apache-2.0
"""Sweeping the flows that have been idle for too long out of their maps, in a thread of its own.

A sweep goes through a map slice by slice with rests between, so that it never keeps the agent
waiting: it glances at when each entry was last used and at its flags, and only where these give
reason to does it gather the flow and decide (plan.expiry).
"""

import itertools
import logging
import struct
import threading
import time
from collections.abc import Iterator, Mapping

from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.datapath.maps.layout import MAPS, ffi, names
from ebpflb.datapath.maps.records import Sweep
from ebpflb.model.services import Protocol
from ebpflb.plan.expiry import Timeouts
from ebpflb.plan.flow_entries import Entries, Flow, Tuple

log = logging.getLogger(__name__)

INTERVAL = 10.0  # seconds a round takes: a flow may go so much later than it is due
SLICE = 512  # entries: a fifth of a millisecond, or some 30 where all of them go
IDLE = 3.0  # rest at least so many times as long as a slice took: a quarter of a CPU at most

# In the order of flow_stats and sweeps.
PROTOCOLS = {"tcp_flows": (Protocol.TCP,), "other_flows": (Protocol.UDP, Protocol.SCTP)}

_FLAGS = names("flow_flag", "FLOW_")
_KEY, _VALUE = MAPS["tcp_flows"].key_size, MAPS["tcp_flows"].value_size
_AT = ffi.offsetof("struct flow", "flags")
_GLANCE = struct.Struct(f"=Q{_AT - 8}xI{_VALUE - _AT - 4}x")  # last_seen, flags


class FlowTable:
    """One of the two maps of flows, and the numbers about it."""

    def __init__(
        self, maps: Mapping[str, Map], name: str, timeouts: Timeouts | None = None
    ) -> None:
        self.name = name
        self._timeouts = timeouts or Timeouts()
        self.flows = maps[name]
        self.number = list(PROTOCOLS).index(name)
        self._sweeps, self._stats = maps["sweeps"], maps["flow_stats"]
        self._patience = [self._wait(bits) for bits in range(2 * max(_FLAGS))]

    @property
    def numbers(self) -> Sweep:
        """What has been swept, held and evicted so far."""
        found: Sweep = self._sweeps.get(self.number)
        return found

    def remove(self, entries: Entries) -> list[Tuple]:
        """Deletes a flow; the keys that are gone: none if one was used since it was read."""
        taken: Entries = {}
        for key, judged in entries.items():
            found = self.flows.take(key)
            if found is not None:
                taken[key] = found
                if found.last_seen > judged.last_seen:
                    return [at for at, flow in taken.items() if not self.flows.put_back(at, flow)]
        return list(taken)

    def count(self, removed: int) -> None:
        """Adds to what has been swept, whoever swept it."""
        numbers = self.numbers
        self._sweeps.write([(self.number, numbers._replace(swept=numbers.swept + removed))])

    def sweep(self) -> Iterator[None]:
        """Once through the map, a slice at each step; at the end the numbers are right."""
        made, held = self._stats.get(self.number)[0], 0
        for keys, values in self.flows.slices(SLICE):
            held += self._sweep_slice(keys, values, time.monotonic_ns())
            yield
        self._conclude(made, held)

    def _sweep_slice(self, keys: bytes, values: bytes, now: int) -> int:
        """How many entries of the slice are left."""
        before = [now - patience for patience in self._patience]
        glances = enumerate(_GLANCE.iter_unpack(values))
        suspects = [index for index, (last, flags) in glances if last <= before[flags]]
        gone: set[Tuple] = set()
        reading = self._read(suspects, keys, values, gone)
        for entries in self._timeouts.expired(reading, self.flows.get, now):
            gone.update(self.remove(entries))
        if not gone:
            return len(values) // _VALUE
        self.count(len(gone))
        here = {keys[at : at + _KEY] for at in range(0, len(keys), _KEY)}
        return len(here.difference(map(self.flows.key.pack, gone)))

    def _read(
        self, indexes: list[int], keys: bytes, values: bytes, gone: set[Tuple]
    ) -> Iterator[tuple[Tuple, Flow]]:
        """These entries, without those that went with another of their flow."""
        for index in indexes:
            key = self.flows.key.unpack(keys[index * _KEY : (index + 1) * _KEY])
            if key not in gone:
                yield key, self.flows.value.unpack(values[index * _VALUE : (index + 1) * _VALUE])

    def _wait(self, bits: int) -> int:
        flags = frozenset(word for bit, word in _FLAGS.items() if bit & bits)
        return min(self._timeouts.patience(each, flags) for each in PROTOCOLS[self.name])

    def _conclude(self, made: int, held: int) -> None:
        """What is missing was evicted. An entry that came or went during the sweep may be missed,
        until the next one; none is called evicted that was not.
        """
        ended, numbers = self._stats.get(self.number)[1], self.numbers
        evicted = max(numbers.evicted, made - ended - numbers.swept - held)
        if evicted > numbers.evicted:
            lost = evicted - numbers.evicted
            log.warning("%s is full: %d entries were evicted for newer ones", self.name, lost)
        self._sweeps.write([(self.number, Sweep(numbers.swept, held, evicted))])


class Sweeper:
    """Sweeps both maps, round and round, from ``start`` to ``stop``."""

    def __init__(self, maps: Mapping[str, Map], timeouts: Timeouts | None = None) -> None:
        self.tables = [FlowTable(maps, name, timeouts) for name in PROTOCOLS]
        self._rest = INTERVAL * SLICE / sum(table.flows.spec.entries for table in self.tables)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sweep", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Returns when no map is in use any more."""
        self._stopped.set()
        if self._thread.ident:
            self._thread.join()

    def _run(self) -> None:
        while not self._stopped.is_set():
            begun = time.monotonic()
            try:
                self._round()
            except Exception:
                log.exception("sweeping flows failed; trying again in %g s", INTERVAL)
            self._stopped.wait(begun + INTERVAL - time.monotonic())

    def _round(self) -> None:
        """Sweeps every map, resting after each slice; or until it is stopped."""
        begun = time.monotonic()
        for _ in itertools.chain.from_iterable(table.sweep() for table in self.tables):
            if self._stopped.wait(max(self._rest, IDLE * (time.monotonic() - begun))):
                return
            begun = time.monotonic()
