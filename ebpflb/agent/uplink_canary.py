# SPDX-License-Identifier: Apache-2.0
"""The canary at each uplink: requests that are not translated there, although a program chose.

A filter or program of others behind ours can send packets past netfilter, or change the field that
carries the choice (skb->priority). Nothing else of the agent would notice. So frames are put into
the ingress of each of the node's own devices (kernel/netfilter/arrivals.py): at the start, after a
change of the device, of its qdiscs or of its filters, for `ebpflb doctor`, and repeatedly while
something is wrong. Programs that others attach by tcx are noticed by doctor alone: the kernel does
not report them.
"""

import logging
import math
import struct
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from ebpflb.agent.canary_sync import CanaryRefused, CanarySync
from ebpflb.agent.inspection import Call
from ebpflb.errors import EbpflbError, in_words
from ebpflb.files import DOCS
from ebpflb.kernel.netfilter.arrivals import Arrival, arrivals
from ebpflb.kernel.netlink import Subscription
from ebpflb.model.devices import Addresses, Device
from ebpflb.plan.canary import UplinkReport
from ebpflb.workers import DescriptorWorker

log = logging.getLogger(__name__)

SETTLE_SECONDS = 0.5  # after a change of filters, which is often several
AGAIN_SECONDS = 10.0  # while something is wrong, or nothing can be probed
_TRAFFIC_CONTROL = 4  # RTNLGRP_TC
_CHANGES = {36, 37, 44, 45}  # RTM_NEWQDISC, _DELQDISC, _NEWTFILTER, _DELTFILTER
_INDEX = struct.Struct("=4xI")  # of struct tcmsg

Uplinks = Mapping[Device, Addresses]
_Answer = TypeVar("_Answer")


class UplinkCanary(DescriptorWorker):
    """``lost``: device -> what becomes of its requests; written by the loop, as ``look_at``."""

    def __init__(
        self,
        put: Callable[[Call[Any]], None],
        probe: Callable[[Uplinks], Mapping[str, Arrival]] = arrivals,
    ) -> None:
        """``put`` belongs to the inbox."""
        super().__init__("uplinks")
        self.lost: Mapping[str, str] = {}
        self._put, self._probe = put, probe
        self._uplinks: Uplinks = {}
        self._due = math.inf
        self._one_probe = threading.Lock()
        self._changes = Subscription(_TRAFFIC_CONTROL)

    def look_at(self, uplinks: Uplinks) -> None:
        """Probe these devices soon if they differ from the last ones."""
        if uplinks != self._uplinks:
            self._uplinks, self._due = uplinks, time.monotonic()
            self.wake()

    def report(self) -> UplinkReport:
        """Probe now, for doctor. Raises CanaryRefused, NodeError, KernelError or TimeoutError."""
        found = self._probed()
        lost = [name for name, arrival in found.items() if arrival.is_loss]
        return UplinkReport(dict(found), lost)

    def start(self) -> None:
        self._changes.begin()
        super().start()

    def stop(self) -> None:
        super().stop()
        self._changes.close()

    def run(self) -> None:
        while not self.stopped.is_set():
            wait = max(self._due - time.monotonic(), 0.0)
            if self.wait([self._changes], wait) and self._concern_uplinks():
                self._due = min(self._due, time.monotonic() + SETTLE_SECONDS)
            if time.monotonic() >= self._due and not self.stopped.is_set():
                self._turn()

    def _concern_uplinks(self) -> bool:
        """Whether the messages are about filters of an uplink, or some were lost (ENOBUFS)."""
        taken = self._changes.take()
        about = {_INDEX.unpack_from(it)[0] for kind, it in taken or () if kind in _CHANGES}
        return taken is None or any(device.index in about for device in self._uplinks)

    def _turn(self) -> None:
        self._due = again = time.monotonic() + AGAIN_SECONDS
        try:
            self._probed()
        except (EbpflbError, OSError) as error:
            log.debug("uplinks are not probed: %s", in_words(error))
            return
        if not self.lost and self._due == again:
            self._due = math.inf

    def _probed(self) -> Mapping[str, Arrival]:
        """Raises CanaryRefused, NodeError, KernelError or TimeoutError."""
        with self._one_probe:
            if not (uplinks := self._call(lambda canary: canary.begin_frames())):
                return {}
            found: Mapping[str, Arrival] | None = None
            try:
                found = self._probe(uplinks)
            finally:
                is_valid = self._call(lambda canary: self._take(canary, found))
        if not is_valid:
            raise CanaryRefused("the agent has withdrawn the canary meanwhile: try again")
        return found

    def _call(self, do: Callable[[CanarySync], _Answer]) -> _Answer:
        """Return the answer of the loop."""
        call = Call[_Answer](lambda cluster, planner, canary: do(canary))
        self._put(call)
        return call.result()

    def _take(self, canary: CanarySync, found: Mapping[str, Arrival] | None) -> bool:
        """End the frames; return whether what was found is true. Called by the loop."""
        if not canary.end_frames() or found is None:
            return False
        lost = {name: str(arrival) for name, arrival in found.items() if arrival.is_loss}
        for name in lost.keys() - self.lost.keys():
            log.error("device %s: %s: see %s/runbook.md, choices lost", name, lost[name], DOCS)
        for name in self.lost.keys() - lost.keys():
            log.warning("device %s: requests are translated again", name)
        self.lost = lost
        return True
