# SPDX-License-Identifier: Apache-2.0
"""Metrics of the kernel's conntrack: how full it is, and which of its entries are flows of ours.

The flows are counted in a thread, at most once a minute, as those of the flow tables are
(datapath.maps.occupancy): 100,000 entries take a second of CPU.
"""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.datapath.maps.frontend_keys import FrontendKeys
from ebpflb.datapath.maps.occupancy import COUNT_INTERVAL
from ebpflb.model.services import Protocol
from ebpflb.node import ctnetlink

log = logging.getLogger(__name__)

_PROTOCOLS = (Protocol.TCP, Protocol.UDP)  # those that the engine takes


def count_connections(maps: Mapping[str, Map]) -> Counter[Protocol]:
    """How many flows conntrack keeps: translated entries to frontends. Raises NodeError."""
    entries = ctnetlink.connections(FrontendKeys(maps))
    return Counter(entry.protocol for entry in entries if entry.is_translated)


class ConntrackCollector:
    """``restored`` returns how often the engine's table was put back."""

    def __init__(self, maps: Mapping[str, Map], restored: Callable[[], int]) -> None:
        self._maps, self._restored = maps, restored
        self._flows: Counter[Protocol] | None = None  # None: not counted yet
        self._began = -COUNT_INTERVAL  # seconds of the monotonic clock
        self._thread: threading.Thread | None = None

    def collect(self) -> Iterable[Metric]:
        self._count_if_due()
        for name, text, value in (
            ("entries", "Entries of the kernel's conntrack, of all kinds", ctnetlink.count()),
            ("max_entries", "Maximum number of entries of conntrack", ctnetlink.limit()),
        ):
            yield GaugeMetricFamily(f"ebpflb_conntrack_{name}", text, value)
        text = "Times that the nft table of the engine netfilter was put back"
        yield CounterMetricFamily("ebpflb_conntrack_table_restored_total", text, self._restored())
        text = "Flows that conntrack keeps, as of the last count"
        flows = GaugeMetricFamily("ebpflb_conntrack_flows", text, labels=["protocol"])
        counted = self._flows
        if counted is not None:
            for protocol in _PROTOCOLS:
                flows.add_metric([protocol.name], counted[protocol])
        yield flows

    def wait(self) -> None:
        """Returns when a count that is under way has ended."""
        if self._thread is not None:
            self._thread.join()

    def _count_if_due(self) -> None:
        now = time.monotonic()
        running = self._thread is not None and self._thread.is_alive()
        if now - self._began >= COUNT_INTERVAL and not running:
            self._began = now
            self._thread = threading.Thread(target=self._count, name="conntrack", daemon=True)
            self._thread.start()

    def _count(self) -> None:
        try:
            self._flows = count_connections(self._maps)
        except Exception:
            log.exception("counting the flows of conntrack failed")
