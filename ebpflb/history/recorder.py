# SPDX-License-Identifier: Apache-2.0
"""The agent's part: its writes, and their causes, one record per sync.

The maps report their writes (``Map.wrote``), so nothing is planned or packed again. A record is one
write(2), at the end of the loop's turn, and costs some microseconds. A thread reads the checkpoint
at the beginning of each file.
"""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from zlib import compress

from ebpflb.errors import EbpflbError, in_words, log_once
from ebpflb.history import segments
from ebpflb.history.segments import (
    Begun,
    Entries,
    Record,
    Reset,
    Sync,
    Whole,
    Write,
    WriteCause,
)
from ebpflb.kernel.maps import layout
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.model.cluster_state import Applied
from ebpflb.model.drift import Drift
from ebpflb.model.events import Changed, Kind, ObjectEvent, Removed, Replaced
from ebpflb.model.services import PortName
from ebpflb.options import Paths
from ebpflb.plan.entries import service_name
from ebpflb.stopping import parts
from ebpflb.version import VERSION

log = logging.getLogger(__name__)

# The maps that only the agent writes; the others change with every connection.
RECORDED = (
    "services",
    "slots",
    "backend_slots",
    "service_names",
    "backend_names",
    "source_ranges",
    "cluster_ips",
    "service_ranges",
    "node_addresses",
    "own_addresses",
    "link_addresses",
    "devices",
    "pod_devices",
    "route_sources",
    "timeouts",
    "settings",
)
MOST_CAUSES = 50  # named in one record
MOST_PENDING = 1 << 20  # bytes that are written even if the sync continues
FILE_RETRY_SECONDS = 60.0  # between two attempts to write a file
AGAIN = WriteCause("again", "what could not be written before")
REMOVED = WriteCause("removed", "endpoint")
AUDIT = WriteCause("audit", "what differed from the plan")
DEVICES = WriteCause("changed", "devices and addresses")
NEIGHBOURS = WriteCause("changed", "neighbours and routes of pods")
CANARY = WriteCause("tried", "the canary")
API_SERVERS = WriteCause("changed", "addresses of API servers")
NODE_LOCAL = WriteCause("changed", "which node-local listeners answer")
UNTRACKED = WriteCause("changed", "rules in raw")
_FAST = 1  # of zlib's levels


class History:
    """The history; if a file cannot be written, the agent continues without it.

    Everything except the checkpoint is called by the agent's loop.
    """

    def __init__(
        self,
        paths: Paths,
        maps: Mapping[str, Map],
        *,
        limit: int = segments.LIMIT,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._paths, self._limit, self._clock = paths, limit, clock
        self._maps = {name: maps[name] for name in RECORDED}
        self._segment: segments.Segment | None = None
        self._lock = threading.Lock()
        self.full_at = 0  # the size at which the file is full
        self.checkpoint: threading.Thread | None = None
        self._causes: list[WriteCause] = []
        self._more = 0
        self.writes: list[Write] = []
        self._pending, self._at = 0, 0.0
        self._fresh = self._failed = self._stopped = False
        self._error, self.next_try = "", 0.0

    def start(self) -> None:
        self._begin(fresh=True)
        self.because(WriteCause("started", "agent", "", VERSION))
        for opened in self._maps.values():
            opened.wrote = self.wrote

    def stop(self) -> None:
        """Write pending records; an incomplete checkpoint is abandoned."""
        self.commit()
        self._stopped = True
        if self.checkpoint:
            self.checkpoint.join()
        self.close_file()

    def event(self, event: ObjectEvent, applied: Applied) -> None:
        """Note an event, which may have changed the cluster state."""
        changed = bool(applied.services or applied.slices)
        if changed or event.kind in (Kind.NODE, Kind.SERVICE_CIDR):
            self.because(_cause(event))

    def because(self, cause: WriteCause) -> None:
        """Add a cause of the writes until the next ``commit``."""
        if len(self._causes) < MOST_CAUSES:
            self._causes.append(cause)
        else:
            self._more += 1

    def explaining(self, report: Callable[[list[Drift]], None]) -> Callable[[list[Drift]], None]:
        """Return the function with the audit's drift added as the cause of its corrections."""

        def explained(drifts: list[Drift]) -> None:
            self.because(AUDIT)
            report(drifts)

        return explained

    def reset(self, name: PortName, endpoint: str, count: str) -> None:
        """Record reset connections to a removed endpoint; nothing was written."""
        done = Reset(service_name(name, 0), endpoint, count)
        self._append(Sync(self._clock(), [REMOVED], 0, [], [done]))

    def wrote(self, name: str, keys: bytes, values: bytes | None) -> None:
        """Note entries that were written to a map, or deleted if ``values`` is None."""
        self._at = self._clock()
        self.writes.append(Write(name, keys, values))
        self._pending += len(keys) + len(values or b"")
        if self._pending > MOST_PENDING:
            self._write()

    def write_failed(self) -> None:
        """Note that the maps may differ from the reported writes."""
        self._failed = True

    def commit(self, *, keep: bool = False, error: str | None = None) -> None:
        """End a turn of the loop. ``keep``: its causes belong to a sync that is still to come.

        ``error``: of the last sync; after an error the next file begins with the content of the
        maps.
        """
        self._fresh |= self._failed and not error
        self._failed = bool(error)
        self._begin_if_deleted()
        if self.writes:
            if not self._causes:
                self.because(AGAIN)
            self._write()
        if not keep:
            self._causes, self._more = [], 0
        self._begin_if_due()

    def _begin_if_deleted(self) -> None:
        """Begin a new file after the old ones were deleted, once the run directory exists again.

        The status file creates the run directory.
        """
        deleted = self._segment and not self._is_reading() and self._segment.is_deleted
        if deleted and self._paths.run.is_dir():
            log.warning("history: its files were removed: a new one begins")
            self._begin(fresh=True)

    def _is_reading(self) -> bool:
        return bool(self.checkpoint and self.checkpoint.is_alive())

    def _begin_if_due(self) -> None:
        if self._is_reading():
            return
        if self._segment is None:
            if time.monotonic() > self.next_try:
                self._begin(fresh=True)
        elif self._fresh or self._segment.size > self.full_at:
            self._begin(fresh=self._fresh)

    def _write(self) -> None:
        record = Sync(self._at, self._causes, self._more, self.writes)
        self.writes, self._pending = [], 0
        self._append(record)

    def _append(self, record: Record) -> bool:
        with self._lock:
            try:
                if self._segment:
                    self._segment.append(record)
            except OSError as error:
                self._fail(error)
            return self._segment is not None

    def _fail(self, error: OSError) -> None:
        line = "history: %s: nothing is recorded until it can be"
        self._error = log_once(log.warning, line, in_words(error), self._error)
        self.next_try = time.monotonic() + FILE_RETRY_SECONDS
        self.close_file()

    def close_file(self) -> None:
        if self._segment:
            self._segment.close()
        self._segment = None

    def _begin(self, *, fresh: bool) -> None:
        """Begin a new file, and its checkpoint in a thread."""
        begun = Begun(self._clock(), layout.layout_hash(), VERSION, fresh)
        try:
            segment = segments.new(self._paths, begun, self._limit)
        except OSError as error:
            self._fail(error)
            return
        with self._lock:
            self.close_file()
            self._segment, self._fresh = segment, False
        self.full_at = self._limit  # until the checkpoint is complete
        self.checkpoint = threading.Thread(target=self._read, name="history", daemon=True)
        self.checkpoint.start()

    def _read(self) -> None:
        parts.attempt("history", self._write_checkpoint)
        part = self._limit // segments.PARTS  # of records, whatever the checkpoint's size
        size = self._segment.size if self._segment else 0
        self.full_at = size + part

    def _write_checkpoint(self) -> None:
        try:
            for name, opened in self._maps.items():
                for keys, values in opened.slices():
                    entries = Entries(name, compress(keys, _FAST), compress(values, _FAST))
                    if self._stopped or not self._append(entries):
                        return
            self._append(Whole(self._clock()))
        except EbpflbError as error:
            log.warning("history: %s: no checkpoint could be written", error)


def _cause(event: ObjectEvent) -> WriteCause:
    match event:
        case Replaced():
            return WriteCause("listed", event.kind, f"{len(event.objects)} of them", event.version)
        case Changed():
            return WriteCause(event.event, event.kind, str(event.key), event.version)
        case Removed():
            return WriteCause("deleted", event.kind, str(event.key), event.version)
