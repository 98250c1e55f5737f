# SPDX-License-Identifier: Apache-2.0
"""Series of single service ports, if --service-metrics asks for them (docs/service-metrics.md).

The programs count new and refused connections of every Service anyway, for `ebpflb services` and
`ebpflb top`. Nothing is added to them: a scrape reads the counters of the chosen service ports.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.records import BackendCounters, ServiceCounters
from ebpflb.model import services
from ebpflb.model.addresses import Family
from ebpflb.model.busiest import Busiest, Port, SeriesOf
from ebpflb.model.events import Key
from ebpflb.model.services import PortName
from ebpflb.plan.entries import Frontend, protocol_name
from ebpflb.plan.planner import Planner
from ebpflb.plan.service_entries import ServiceEntries

CHOICE_INTERVAL = 60.0  # seconds between two choices, if metrics are scraped

_LABELS = ["namespace", "name", "port", "protocol"]


class OpenFlows(NamedTuple):
    """Open flows of packets, as of the last counts (docs/metrics.md)."""

    tables: Mapping[int, int]  # of the flow tables, by service id
    conntrack: Mapping[Frontend, int]


Labels = Callable[[Key], str]
"""From a Service to its labels, as ``show_labels`` writes them."""


class ServicesCollector:
    """``planner`` returns the current planner, which the agent may replace."""

    def __init__(
        self,
        series: SeriesOf,
        maps: Mapping[str, Map],
        planner: Callable[[], Planner],
        labels_of: Labels,
        open_flows: Callable[[], OpenFlows],
    ) -> None:
        self._selector, self._busiest = series.selector, Busiest(series.limit)
        self._maps, self._planner, self._labels_of = maps, planner, labels_of
        self._open_flows = open_flows
        self._choice_due = 0.0  # of the monotonic clock
        self._left_out = 0

    def collect(self) -> Iterable[Metric]:
        if time.monotonic() >= self._choice_due:
            self._choose()
            self._choice_due = time.monotonic() + CHOICE_INTERVAL
        entries = self._entries()
        yield from self._counters(entries)
        yield self._open(entries)
        text = "Service ports without series: there are more than --service-metrics allows"
        yield GaugeMetricFamily("ebpflb_service_ports_without_series", text, self._left_out)

    def _choose(self) -> None:
        ids: dict[Port, list[int]] = {}
        for name, entries in self._planner().actual.copy().items():
            if services.meets(self._selector, self._labels_of(name.owner)):
                ids.setdefault(Port(*name[:4]), []).append(entries.id)
        counts = self._counts(id for each in ids.values() for id in each)
        self._busiest.choose(
            {port: sum(_total(counts[id]) for id in each) for port, each in ids.items()}
        )
        self._left_out = len(ids) - len(self._busiest.ports)

    def _entries(self) -> dict[Port, list[ServiceEntries]]:
        """Return the current entries of the chosen service ports that still exist, by family."""
        actual = self._planner().actual
        found = {
            port: [actual.get(PortName(*port, family)) for family in Family]
            for port in self._busiest.ports
        }
        existing = {port: [it for it in each if it] for port, each in found.items()}
        return {port: each for port, each in existing.items() if each}

    def _counts(self, ids: Iterable[int]) -> dict[int, ServiceCounters]:
        found = self._maps["service_stats"].get_many({*ids})
        return {id: ServiceCounters(*counts) for id, counts in found.items()}

    def _counters(self, entries: Mapping[Port, list[ServiceEntries]]) -> Iterable[Metric]:
        text = "New connections and flows that got an endpoint"
        new = CounterMetricFamily("ebpflb_service_connections_total", text, labels=_LABELS)
        text = "Connections and packets that got none, because the Service has none here"
        labels = [*_LABELS, "verdict"]
        refused = CounterMetricFamily("ebpflb_service_refused_total", text, labels=labels)
        counts = self._counts(it.id for each in entries.values() for it in each)
        for port, each in entries.items():
            own = [counts[it.id] for it in each]
            new.add_metric([*_words(port)], sum(it.chosen for it in own))
            for verdict in ("refused", "no_local_endpoint"):
                number = sum(getattr(it, verdict) for it in own)
                refused.add_metric([*_words(port), verdict], number)
        yield new
        yield refused

    def _open(self, entries: Mapping[Port, list[ServiceEntries]]) -> Metric:
        text = "Open connections: of sockets now, of packets as of the last count"
        metric = GaugeMetricFamily(
            "ebpflb_service_open_connections", text, labels=[*_LABELS, "path"]
        )
        backends = {id for each in entries.values() for it in each for id in it.ids}
        sockets = {
            id: BackendCounters(*counts)
            for id, counts in self._maps["backend_stats"].get_many(backends).items()
        }
        tables, conntrack = self._open_flows()
        for port, each in entries.items():
            own = [sockets[id] for it in each for id in it.ids]
            number = sum(max(it.opened - it.closed, 0) for it in own)
            metric.add_metric([*_words(port), "socket"], number)
            number = sum(tables.get(it.id, 0) for it in each)
            number += sum(conntrack.get(frontend, 0) for it in each for frontend in it.services)
            metric.add_metric([*_words(port), "packet"], number)
        return metric


def _total(counts: ServiceCounters) -> int:
    return counts.chosen + counts.refused + counts.no_local_endpoint


def _words(port: Port) -> tuple[str, str, str, str]:
    return *port[:3], protocol_name(port.protocol)
