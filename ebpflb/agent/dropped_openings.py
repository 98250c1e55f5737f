# SPDX-License-Identifier: Apache-2.0
"""Removes the conntrack entries of flows whose first packet netfilter has dropped.

A program opens a flow at ingress, before netfilter has decided about its packet. One that does not
come to egress was dropped; with kube-proxy there would be no entry of it. The programs look at a
flow's place when 4,096 further ones have been opened (bpf/engine/conntrack/opening.h); where so
many do not come, this sweep looks. An entry that has seen a reply stays. One that sees its first
reply between the look and the removal is lost, and its client begins anew.

A reply to a flow that has not come to egress shows that egress is not told which packets have left.
Then nothing counts as dropped, for NOTE_LOST_SECONDS.
"""

import logging
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping

from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.datapath.maps.layout import MAPS, ffi
from ebpflb.datapath.maps.records import Opening
from ebpflb.errors import in_words
from ebpflb.model.services import Protocol
from ebpflb.node import ctnetlink
from ebpflb.plan.connections import SEEN_REPLY, Ends

log = logging.getLogger(__name__)

_SWEEP_INTERVAL = 10.0  # seconds
DROPPED_AFTER = 1_000_000_000  # nanoseconds: by then a packet has come from ingress to egress
_SLICE = 256  # places; a millisecond, or ten where all are of dropped packets
PAUSE = 0.05  # seconds after each

NOTE_LOST_FOR = ffi.typeof("enum opening_limit").relements["NOTE_LOST_SECONDS"] * 10**9

_SIZE = MAPS["openings"].value_size
_CREATED, _LEFT = (ffi.offsetof("struct opening", name) for name in ("created", "left"))
_CREATED_AND_LEFT = struct.Struct(f"={_CREATED}xQ{_LEFT - _CREATED - 8}xB{_SIZE - _LEFT - 1}x")


class DroppedOpenings:
    """Sweeps every SWEEP_INTERVAL in a thread, from ``start`` to ``stop``."""

    def __init__(self, maps: Mapping[str, Map]) -> None:
        self._openings, self._counts = maps["openings"], maps["opening_counts"]
        self._opened = self._seen_until = 0
        self._note_lost = 0  # when it was seen last, as in opening_counts
        self._all_seen = False
        self._stopped = threading.Event()
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="dropped openings", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread.ident:
            self._thread.join()

    def sweep(self, until: int) -> int:
        """How many entries were removed, of flows that were opened after the last sweep's ``until``
        and not after this one: nanoseconds of CLOCK_MONOTONIC. Raises KernelError and NodeError.
        """
        removed = 0
        for _, values in self._openings.slices(_SLICE):
            flows = list(_known(self._stayed(values, until)))
            entries = list(ctnetlink.find(flows)) if flows else []
            if any(entry.status & SEEN_REPLY for entry in entries):
                self._note_lost = until
                break
            if entries and not self._is_note_lost(until):
                removed += ctnetlink.delete(entries)
            self._stopped.wait(PAUSE)
        self._seen_until = until
        return removed

    def _run(self) -> None:
        while not self._stopped.wait(_SWEEP_INTERVAL):
            try:
                self._sweep_if_due()
                self._error = None
            except Exception as error:  # the next sweep tries again
                text = in_words(error)
                if text != self._error:
                    log.error("entries of dropped packets stay until they time out: %s", text)
                self._error = text

    def _sweep_if_due(self) -> None:
        """Once more after the last flow, which was too young the first time; then no more."""
        opened = self._counts.get(0).opened
        is_quiet = opened == self._opened
        if not (is_quiet and self._all_seen):
            self.sweep(time.monotonic_ns() - DROPPED_AFTER)
        self._opened, self._all_seen = opened, is_quiet

    def _is_note_lost(self, until: int) -> bool:
        last: int = max(self._note_lost, self._counts.get(0).note_lost)
        return last > 0 and until < last + NOTE_LOST_FOR

    def _stayed(self, values: bytes, until: int) -> Iterator[Opening]:
        for number, (created, left) in enumerate(_CREATED_AND_LEFT.iter_unpack(values)):
            if not left and self._seen_until < created <= until:
                yield self._openings.value.unpack(values[number * _SIZE : (number + 1) * _SIZE])


def _known(openings: Iterable[Opening]) -> Iterator[tuple[int, Ends]]:
    """Those of the protocols that netlink is asked about."""
    for opening in openings:
        found = opening.tuple
        if found.protocol in frozenset(Protocol):
            ends = Ends(found.source, found.destination, found.source_port, found.destination_port)
            yield found.protocol, ends
