# SPDX-License-Identifier: Apache-2.0
"""The conntrack entries of UDP flows that programs report: deleted one by one.

After a backend was removed conntrack still translates its flows' datagrams by their entries. A flow
is reported with its first datagram then, and its entry is deleted within a millisecond, however
many entries conntrack has. Two programs report:

- ingress, when it gives a flow that it remembers another backend (bpf/engine/netfilter/choose.h)
- egress, when a datagram leaves for the removed endpoint (bpf/path/stale_endpoint.h): also of a
  flow that ingress does not remember; but the endpoint may be a process of this node itself, and
  then no program sees the datagram leave

Flows that neither reports, as those that send nothing, are left to the search
(conntrack_worker.py); so is a flow whose report was lost, or whose entry could not be deleted.
"""

import logging
import math
import time
from collections.abc import Callable
from contextlib import closing
from itertools import islice

from ebpflb.agent.stale_udp.conntrack_worker import OnSearch, StaleConnections
from ebpflb.agent.stale_udp.lookups import Maps
from ebpflb.errors import EbpflbError, in_words, log_once
from ebpflb.kernel.maps.ring import Ring
from ebpflb.plan.flow_entries import Tuple
from ebpflb.workers import DescriptorWorker

log = logging.getLogger(__name__)

MAP = "moved_flows"
MOST_FLOWS = 1024  # at once: 50 ms of CPU; a search of conntrack costs less than many more


class MovedFlowsWorker(DescriptorWorker):
    """Delete the entries in a thread from ``start`` to ``stop``.

    After a deletion the thread calls ``on_search`` for each family, with the seconds that it took,
    and the number of entries. ``clock`` is a monotonic clock, in seconds.
    """

    def __init__(
        self,
        maps: Maps,
        on_search: OnSearch,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__("moved-udp-flows")
        self.on_search, self._clock = on_search, clock
        self.entries = StaleConnections(maps)
        self._map = maps[MAP]
        self._error: str | None = None

    def run(self) -> None:
        with closing(Ring(self._map)) as ring:
            ring.take()  # reports to a former agent: everything is searched for at the start
            while not self.stopped.is_set():
                self.wait([ring], math.inf)
                self._delete(ring.take_values())

    def _delete(self, flows: list[Tuple]) -> None:
        begun, different = self._clock(), dict.fromkeys(flows)
        try:
            deleted = self.entries.delete_flows(islice(different, MOST_FLOWS))
        except (EbpflbError, OSError) as error:
            line = "moved UDP flows stay in conntrack until the next search: %s"
            self._error = log_once(log.warning, line, in_words(error), self._error)
            return
        self._error = None
        for family, count in deleted.items():
            self.on_search(family, self._clock() - begun, count)
