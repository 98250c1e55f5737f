# SPDX-License-Identifier: Apache-2.0
"""What the maps and the hooks tell when they are asked, at each scrape and for the same price
whatever the number of services, endpoints and flows.

Exact: verdicts, what has become of flow entries, the room in maps that the agent fills (the
planner knows), and the small maps, which are walked. As of the last sweep, ten seconds ago at
most: the entries of tcp_flows and other_flows. As of the last count, a minute ago at most if
someone scrapes: the flows themselves, and the entries of the other LRU maps.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ebpflb.datapath.attach import hook_stats
from ebpflb.datapath.maps.bpf_map import Map
from ebpflb.datapath.maps.layout import MAPS, VERDICTS
from ebpflb.datapath.maps.occupancy import COUNTED_MAPS, Counts, Occupancy
from ebpflb.datapath.maps.pins import StateDir
from ebpflb.datapath.maps.sweep import PROTOCOLS, FlowTable
from ebpflb.datapath.programs.loader import Program
from ebpflb.plan.planner import Planner
from ebpflb.plan.use import used

WALKED = ("node_addresses", "devices", "service_ranges")  # as many as a node has

_FLOW_ENTRIES = {
    "made": "made by packets",
    "ended": "ended by packets, for a newer flow",
    "refused": "that did not fit into the map",
    "swept": "swept by the agent: closed or idle",
    "evicted": "that the LRU evicted for newer ones, as of the last sweep",
}


class MapsCollector:
    """Reads the maps; ``planner`` is asked for anew each time, for the agent may begin anew."""

    def __init__(
        self, maps: Mapping[str, Map], planner: Callable[[], Planner], occupancy: Occupancy
    ) -> None:
        self._maps, self._planner, self._occupancy = maps, planner, occupancy
        self._tables = [FlowTable(maps, name) for name in PROTOCOLS]

    def collect(self) -> Iterable[Metric]:
        counts = self._occupancy.latest()
        yield self._verdicts()
        yield from self._capacity(counts)
        yield from self._flow_entries()
        yield from _counted(counts)

    def _verdicts(self) -> Metric:
        text = "Outcomes of calls and packets, since the maps were made"
        metric = CounterMetricFamily("ebpflb_verdicts_total", text, labels=["verdict"])
        for number, name in VERDICTS.items():
            metric.add_metric([name], self._maps["verdicts"].get(number)[0])
        return metric

    def _capacity(self, counts: Counts) -> Iterator[Metric]:
        entries = GaugeMetricFamily("ebpflb_map_entries", "Entries of a map", labels=["map"])
        text = "Maximum number of entries of a map"
        maximum = GaugeMetricFamily("ebpflb_map_max_entries", text, labels=["map"])
        found = self._entries(counts)
        for name, count in found.items():
            entries.add_metric([name], count)
        for name in sorted({*found, *COUNTED_MAPS}):
            maximum.add_metric([name], MAPS[name].entries)
        yield entries
        yield maximum

    def _entries(self, counts: Counts) -> dict[str, int]:
        return {
            **used(self._planner()),
            **{name: _walked(self._maps[name]) for name in WALKED},
            **{table.name: table.numbers.held for table in self._tables},
            **counts.entries,
        }

    def _flow_entries(self) -> Iterator[Metric]:
        """Of entries: a flow has two, or four where it is masqueraded."""
        found = [(table.name, self._fate(table)) for table in self._tables]
        for fate, said in _FLOW_ENTRIES.items():
            name, text = f"ebpflb_flow_entries_{fate}_total", f"Entries of flows {said}"
            metric = CounterMetricFamily(name, text, labels=["map"])
            for table, fates in found:
                metric.add_metric([table], fates[fate])
            yield metric

    def _fate(self, table: FlowTable) -> dict[str, int]:
        made, ended, refused = self._maps["flow_stats"].get(table.number)
        swept, _, evicted = table.numbers
        return dict(zip(_FLOW_ENTRIES, (made, ended, refused, swept, evicted), strict=True))


class HooksCollector:
    """Asks the kernel how often the hooks ran; ``loaded`` are the programs of this agent."""

    def __init__(self, state: StateDir, loaded: Callable[[], Iterable[Program]]) -> None:
        self._state, self._loaded = state, loaded

    def collect(self) -> Iterable[Metric]:
        text = "Whether the kernel counts the runs of hooks: kernel.bpf_stats_enabled"
        enabled = hook_stats.enabled()
        yield GaugeMetricFamily("ebpflb_hook_statistics_enabled", text, enabled)
        seconds, runs = (
            CounterMetricFamily(f"ebpflb_hook_{what}_total", text, labels=["hook"])
            for what, text in (
                ("run_seconds", "Time that a hook has run, while the kernel counted"),
                ("runs", "How often a hook has run, while the kernel counted"),
            )
        )
        for hook, time in hook_stats.run_times(self._state, self._loaded()).items():
            seconds.add_metric([hook], time.seconds)
            runs.add_metric([hook], time.runs)
        yield seconds
        yield runs


def _walked(small: Map) -> int:
    return sum(len(keys) // small.spec.key_size for keys, _ in small.slices())


def _counted(counts: Counts) -> Iterator[Metric]:
    text = "Flows through the packet path, as of the last count"
    flows = GaugeMetricFamily("ebpflb_flows", text, labels=["protocol"])
    for protocol, count in counts.flows.items():
        flows.add_metric([protocol.name], count)
    yield flows
    text = "Time of the last count of flows and of the entries of LRU maps; 0 before the first"
    yield GaugeMetricFamily("ebpflb_occupancy_timestamp_seconds", text, counts.at)
