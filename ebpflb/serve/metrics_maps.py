# SPDX-License-Identifier: Apache-2.0
"""Metrics that are read from the maps and the hooks at each scrape. A scrape costs the same
whatever the number of services, endpoints and flows.

Exact: verdicts, events of flow entries, the entries of maps that the agent writes (counted by the
planner) and of the small maps, which are read whole. As of the last sweep, at most ten seconds ago:
the entries of tcp_flows and other_flows. As of the last count, at most a minute ago while someone
scrapes: the flows, and the entries of the other LRU maps.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ebpflb.datapath.attach import hook_stats
from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.datapath.maps.layout import VERDICTS
from ebpflb.datapath.maps.occupancy import COUNTED_MAPS, Counts, Occupancy
from ebpflb.datapath.maps.state_dir import StateDir
from ebpflb.datapath.maps.sweep import FLOW_MAPS, FlowTable
from ebpflb.datapath.programs.loader import Program
from ebpflb.model.scheduler import SCHEDULERS
from ebpflb.plan.planner import Planner

COUNTED_WHOLE = (
    "node_addresses",
    "own_addresses",
    "link_addresses",
    "devices",
    "route_sources",
    "service_ranges",
)  # small: read at each scrape

_FLOW_ENTRY_EVENTS = {
    "created": "created by packets",
    "deleted": "deleted by packets of a newer flow",
    "refused": "that were not created because the map was full",
    "swept": "deleted by the agent because the flow was closed or idle",
    "evicted": "evicted by the LRU for newer ones, as of the last sweep",
}


class MapsCollector:
    """Reads the maps. ``planner`` returns the present one: the agent may replace it."""

    def __init__(
        self, maps: Mapping[str, Map], planner: Callable[[], Planner], occupancy: Occupancy
    ) -> None:
        self._maps, self._planner, self._occupancy = maps, planner, occupancy
        self._tables = [FlowTable(maps, name) for name in FLOW_MAPS]

    def collect(self) -> Iterable[Metric]:
        counts = self._occupancy.latest()
        yield self._verdicts()
        yield from self._map_entries(counts)
        yield from self._schedulers()
        yield from self._flow_entries()
        yield from _counted(counts)

    def _verdicts(self) -> Metric:
        text = "Outcomes of socket calls and packets, since the maps were created"
        metric = CounterMetricFamily("ebpflb_verdicts_total", text, labels=["verdict"])
        for number, name in VERDICTS.items():
            metric.add_metric([name], self._maps["verdicts"].get(number)[0])
        return metric

    def _map_entries(self, counts: Counts) -> Iterator[Metric]:
        entries = GaugeMetricFamily("ebpflb_map_entries", "Entries of a map", labels=["map"])
        text = "Maximum number of entries of a map"
        limits = GaugeMetricFamily("ebpflb_map_max_entries", text, labels=["map"])
        found = self._entries(counts)
        for name, count in found.items():
            entries.add_metric([name], count)
        for name in sorted({*found, *COUNTED_MAPS}):
            limits.add_metric([name], self._maps[name].spec.entries)
        yield entries
        yield limits

    def _schedulers(self) -> Iterator[Metric]:
        text = "Service ports in the maps, by the scheduler in force"
        name = "ebpflb_service_ports_by_scheduler"
        metric = GaugeMetricFamily(name, text, labels=["scheduler"])
        totals = self._planner().totals
        for each in SCHEDULERS:
            metric.add_metric([each], totals.schedulers[each])
        yield metric
        text = "Service ports in the maps that go by weights which differ"
        yield GaugeMetricFamily("ebpflb_service_ports_weighted", text, value=totals.weighted)

    def _entries(self, counts: Counts) -> dict[str, int]:
        return {
            **self._planner().used_entries(),
            **{name: _count(self._maps[name]) for name in COUNTED_WHOLE},
            **{table.name: table.numbers.entries for table in self._tables},
            **counts.entries,
        }

    def _flow_entries(self) -> Iterator[Metric]:
        """Entries, not flows: a flow has two, or four if it is masqueraded."""
        counts = {table.name: self._flow_entry_events(table) for table in self._tables}
        for event, text in _FLOW_ENTRY_EVENTS.items():
            name = f"ebpflb_flow_entries_{event}_total"
            metric = CounterMetricFamily(name, f"Flow entries {text}", labels=["map"])
            for table_name, events in counts.items():
                metric.add_metric([table_name], events[event])
            yield metric
        text = "Half-open flows deleted by packets of a newer flow"
        metric = CounterMetricFamily("ebpflb_half_open_flows_displaced_total", text, labels=["map"])
        for table in self._tables:
            metric.add_metric([table.name], self._maps["flow_stats"].get(table.number)[3])
        yield metric

    def _flow_entry_events(self, table: FlowTable) -> dict[str, int]:
        created, deleted, full, _ = self._maps["flow_stats"].get(table.number)
        swept, _, evicted = table.numbers
        return dict(zip(_FLOW_ENTRY_EVENTS, (created, deleted, full, swept, evicted), strict=True))


class HooksCollector:
    """Asks the kernel how often the hooks ran. ``loaded`` returns the programs of this agent."""

    def __init__(self, state: StateDir, loaded: Callable[[], Iterable[Program]]) -> None:
        self._state, self._loaded = state, loaded

    def collect(self) -> Iterable[Metric]:
        text = "Whether the kernel measures the runs of hooks (kernel.bpf_stats_enabled)"
        enabled = hook_stats.enabled()
        yield GaugeMetricFamily("ebpflb_hook_statistics_enabled", text, enabled)
        seconds, runs = (
            CounterMetricFamily(f"ebpflb_hook_{what}_total", text, labels=["hook"])
            for what, text in (
                ("run_seconds", "Run time of a hook, while the kernel measured it"),
                ("runs", "Runs of a hook, while the kernel counted them"),
            )
        )
        for hook, time in hook_stats.run_times(self._state, self._loaded()).items():
            seconds.add_metric([hook], time.seconds)
            runs.add_metric([hook], time.runs)
        yield seconds
        yield runs


def _count(small: Map) -> int:
    return sum(len(keys) // small.spec.key_size for keys, _ in small.slices())


def _counted(counts: Counts) -> Iterator[Metric]:
    text = "Flows of the packet path, as of the last count"
    flows = GaugeMetricFamily("ebpflb_flows", text, labels=["protocol"])
    for protocol, count in counts.flows.items():
        flows.add_metric([protocol.name], count)
    yield flows
    text = "Connections that least-connections did not count: its map was full, as last counted"
    metric = CounterMetricFamily("ebpflb_connections_uncounted_total", text)
    if counts.at:
        metric.add_metric([], counts.uncounted)
    yield metric
    text = "Time of the last count of flows and of the entries of LRU maps; 0 before the first"
    yield GaugeMetricFamily("ebpflb_occupancy_timestamp_seconds", text, counts.at)
