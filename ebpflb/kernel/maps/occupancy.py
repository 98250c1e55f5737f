# SPDX-License-Identifier: Apache-2.0
"""How many entries the maps hold that programs fill, counted once a minute if metrics are read.

The kernel keeps no count of a map's entries: they are counted by reading all of them. A thread of
its own does that, a slice at a time with pauses between; readers get what the last count found.
"""

import logging
import secrets
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ebpflb.kernel.maps.bpf_map import Map, MappedArray
from ebpflb.kernel.maps.layout import MAPS, MapSpec, ffi, names
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.maps.sweep import FLOW_MAPS, SWEEP_PAUSE_FACTOR, SWEEP_SLICE
from ebpflb.model.services import Protocol
from ebpflb.plan.entries import BackendLoad
from ebpflb.plan.flow_entries import Hook

# How many connections each backend has, where one of the three maps that say it has lost its pin.
#
# An element of sockets or connections takes from backend_loads what it has added to it
# (bpf/core/connection.h). If one of them were made anew beside the others, what the lost elements
# have added would stay for ever, or elements would take what was never added. So backend_loads is
# made anew too, with a generation that no element has. An earlier agent's programs go on with
# theirs.

_LOADS = "backend_loads"
COUNTED = ("sockets", "connections", _LOADS)
_GENERATION_BITS = 31  # it grows by one when a backend is removed, and must not pass 32 bits

log = logging.getLogger(__name__)


def renew_if_lost(state: StateDir, specs: Mapping[str, MapSpec]) -> None:
    """Before maps are opened; if killed amid it, the next start finds one missing again."""
    lost = [name for name in COUNTED if not state.is_pinned(specs[name])]
    if 0 < len(lost) < len(COUNTED):
        log.warning(
            "map %s has lost its pin: connections of backends are counted anew", ", ".join(lost)
        )
        state.renew(specs[_LOADS], _begin_counts)


def _begin_counts(loads: Map) -> None:
    assert isinstance(loads, MappedArray)
    load = loads.value.pack(BackendLoad(generation=secrets.randbits(_GENERATION_BITS)))
    loads.memory[0 : loads.spec.entries * loads.stride] = load * loads.spec.entries


COUNT_INTERVAL = 60.0  # seconds from one count to the next, if someone asks for it

# What programs fill, but for the flows, whose entries the sweeper counts (sweep.py).
_FILLED = [n for n, s in MAPS.items() if s.is_filled_by_programs and n not in FLOW_MAPS]
COUNTED_MAPS = (*_FILLED, "connections")

_REQUEST = {word: bit for bit, word in names("flow_flag", "FLOW_").items()}["request"]
_AT = {name: ffi.offsetof("struct tuple", name) for name in ("protocol", "hook")}
_FLAGS_AT = ffi.offsetof("struct flow", "flags")
_KEY = struct.Struct(f"={_AT['protocol']}xBB{MAPS['tcp_flows'].key_size - _AT['hook'] - 1}x")
_VALUE = struct.Struct(f"={_FLAGS_AT}xH{MAPS['tcp_flows'].value_size - _FLAGS_AT - 2}x")
_UNCOUNTED_AT = ffi.offsetof("struct backend_load", "uncounted")
_LOAD_SIZE = MAPS["backend_loads"].value_size
_UNCOUNTED = struct.Struct(f"={_UNCOUNTED_AT}xI{_LOAD_SIZE - _UNCOUNTED_AT - 4}x")


@dataclass(frozen=True)
class Counts:
    """``at`` is in seconds since the epoch; ``entries`` by map, ``flows`` by protocol.

    ``uncounted``: connections that least-connections did not count, since the maps were created.
    """

    at: float
    entries: Mapping[str, int]
    flows: Mapping[Protocol, int]
    uncounted: int


NO_COUNTS = Counts(0.0, {}, {}, 0)


class Occupancy:
    """Counts when it is read and the last count is old; one count at a time."""

    def __init__(self, maps: Mapping[str, Map]) -> None:
        self._maps = maps
        self._counts = NO_COUNTS
        self._began = -COUNT_INTERVAL  # seconds of the monotonic clock
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def latest(self) -> Counts:
        """The last count's result, at once; NO_COUNTS before the first one has ended.

        Starts another count where the last one is older than COUNT_INTERVAL.
        """
        counts, now = self._counts, time.monotonic()
        if (
            now - self._began >= COUNT_INTERVAL
            and not self._counting
            and not self._stopped.is_set()
        ):
            self._began = now
            self._thread = threading.Thread(target=self._run, name="occupancy", daemon=True)
            self._thread.start()
        return counts

    def stop(self) -> None:
        """Returns when no map is in use any more; nothing is counted after it."""
        self._stopped.set()
        self.wait()

    def wait(self) -> None:
        """Returns when a count that is under way has ended."""
        if self._thread is not None:
            self._thread.join()

    @property
    def _counting(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _run(self) -> None:
        try:
            entries = {name: self._entries(name) for name in COUNTED_MAPS}
            flows, uncounted = self._flows(), self._uncounted()
        except Exception:
            log.exception("counting the maps failed; trying again in %g s", COUNT_INTERVAL)
        else:
            if not self._stopped.is_set():
                self._counts = Counts(time.time(), entries, flows, uncounted)

    def _entries(self, name: str) -> int:
        size = self._maps[name].spec.key_size
        return sum(len(keys) // size for keys, _ in self._slices(name))

    def _flows(self) -> dict[Protocol, int]:
        """Each flow is counted by one of its entries: the client's request at ingress."""
        found: Counter[int] = Counter()
        for name in FLOW_MAPS:
            for keys, values in self._slices(name):
                pairs = zip(_KEY.iter_unpack(keys), _VALUE.iter_unpack(values), strict=True)
                found.update(
                    protocol
                    for (protocol, hook), (flags,) in pairs
                    if hook == Hook.INGRESS and flags & _REQUEST
                )
        return {protocol: found[protocol] for protocol in Protocol}

    def _uncounted(self) -> int:
        values = (values for _, values in self._slices("backend_loads"))
        return sum(count for each in values for (count,) in _UNCOUNTED.iter_unpack(each))

    def _slices(self, name: str) -> Iterator[tuple[bytes, bytes]]:
        begun = time.monotonic()
        for part in self._maps[name].slices(SWEEP_SLICE):
            yield part
            if self._stopped.wait(SWEEP_PAUSE_FACTOR * (time.monotonic() - begun)):
                return
            begun = time.monotonic()
