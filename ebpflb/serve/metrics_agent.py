# SPDX-License-Identifier: Apache-2.0
"""Metrics of one agent: of its maps and hooks, of the kernel's conntrack, and of its status.

At most MAX_SERIES Services that are not programmed are named: the reason is a full map, the same
for all, and `ebpflb status` names the others.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from ebpflb.kernel.attach import device_programs
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.frontend_keys import FrontendKeys
from ebpflb.kernel.maps.layout import VERDICTS, layout_hash
from ebpflb.kernel.maps.occupancy import COUNT_INTERVAL, COUNTED_MAPS, Counts, Occupancy
from ebpflb.kernel.maps.state_dir import StateDir
from ebpflb.kernel.maps.sweep import FLOW_MAPS, FlowTable
from ebpflb.kernel.netfilter import conntrack
from ebpflb.kernel.programs.loader import Program
from ebpflb.model.annotations import SCHEDULERS
from ebpflb.model.events import Kind
from ebpflb.model.services import Protocol
from ebpflb.plan.entries import Frontend
from ebpflb.plan.flow_entries import ENDED_TCP_STATES
from ebpflb.plan.planner import Planner
from ebpflb.serve.conditions import conditions
from ebpflb.serve.status import AgentStatus
from ebpflb.version import BUILD_DATE, COMMIT, VERSION
from ebpflb.workers import Count

# Metrics that are read from the maps and the hooks at each scrape. The cost of a scrape does not
# depend on the number of services, endpoints and flows.
#
# Exact are verdicts, events of flow entries, the entries of maps that the agent writes (counted by
# the planner) and of the small maps, which are read whole. The entries of tcp_flows and other_flows
# are from the last sweep, at most ten seconds ago. The flows, and the entries of the other LRU
# maps, are from the last count, at most a minute ago while metrics are scraped.

COUNTED_WHOLE = (
    "node_addresses",
    "own_addresses",
    "link_addresses",
    "devices",
    "pod_devices",
    "route_sources",
    "service_ranges",
    "stale_endpoints",
)  # small: read at each scrape

_FLOW_ENTRY_EVENTS = {
    "created": "created by packets",
    "deleted": "deleted by packets of a newer flow",
    "refused": "that were not created because the map was full",
    "swept": "deleted by the agent because the flow was closed or idle",
    "evicted": "evicted by the LRU for newer ones, as of the last sweep",
}


class MapsCollector:
    """Read the maps. ``planner`` returns the current planner, which the agent may replace."""

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
        text = "Service ports in the maps, by the scheduler that they use now"
        name = "ebpflb_service_ports_by_scheduler"
        metric = GaugeMetricFamily(name, text, labels=["scheduler"])
        totals = self._planner().totals
        for each in SCHEDULERS:
            metric.add_metric([each], totals.schedulers[each])
        yield metric
        text = "Service ports in the maps whose endpoints have different weights"
        yield GaugeMetricFamily("ebpflb_service_ports_weighted", text, value=totals.weighted)

    def _entries(self, counts: Counts) -> dict[str, int]:
        return {
            **self._planner().used_entries(),
            **{name: self._maps[name].count() for name in COUNTED_WHOLE},
            **{table.name: table.numbers.entries for table in self._tables},
            **counts.entries,
        }

    def _flow_entries(self) -> Iterator[Metric]:
        """Yield metrics of entries, not flows: a flow has two, or four if it is masqueraded."""
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
    """Ask the kernel how often the hooks ran. ``loaded`` returns the programs of this agent."""

    def __init__(self, state: StateDir, loaded: Callable[[], Iterable[Program]]) -> None:
        self._state, self._loaded = state, loaded

    def collect(self) -> Iterable[Metric]:
        text = "Whether the kernel measures the runs of hooks (kernel.bpf_stats_enabled)"
        enabled = device_programs.statistics_enabled()
        yield GaugeMetricFamily("ebpflb_hook_statistics_enabled", text, enabled)
        seconds, runs = (
            CounterMetricFamily(f"ebpflb_hook_{what}_total", text, labels=["hook"])
            for what, text in (
                ("run_seconds", "Run time of a hook, while the kernel measured it"),
                ("runs", "Runs of a hook, while the kernel counted them"),
            )
        )
        for hook, used in device_programs.run_times(self._state, self._loaded()).items():
            seconds.add_metric([hook], used.seconds)
            runs.add_metric([hook], used.runs)
        yield seconds
        yield runs


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


# Metrics of the kernel's conntrack: how full it is, and which of its entries are flows of ebpflb.
#
# A thread counts the flows at most once a minute, like those of the flow tables
# (kernel/maps/occupancy.py): 100,000 entries take a second of CPU.

log = logging.getLogger(__name__)

_PROTOCOLS = (Protocol.TCP, Protocol.UDP)  # the protocols that the engine translates


class ConntrackFlows(NamedTuple):
    """The flows in conntrack: translated entries to frontends.

    ``open`` leaves out TCP connections that have ended, of which only the entry remains.
    """

    by_protocol: Counter[Protocol]
    open: Counter[Frontend]


def count_connections(maps: Mapping[str, Map]) -> ConntrackFlows:
    """Raises NodeError."""
    frontends = FrontendKeys(maps)
    alike = Counter(
        (it.protocol, it.tcp_state, it.original.destination, it.original.destination_port)
        for it in conntrack.connections(frontends)
        if it.is_translated
    )
    found = ConntrackFlows(Counter(), Counter())
    for (protocol, tcp_state, address, port), number in alike.items():
        found.by_protocol[protocol] += number
        if tcp_state not in ENDED_TCP_STATES:
            found.open[frontends.frontend(protocol, address, port)] += number
    return found


class ConntrackCollector:
    """``restored`` returns how often the engine's table was put back."""

    def __init__(self, maps: Mapping[str, Map], restored: Callable[[], int]) -> None:
        self._restored = restored
        first: ConntrackFlows | None = None  # not counted yet
        count = partial(count_connections, maps)
        self._flows = Count("flows of conntrack", COUNT_INTERVAL, count, first)

    def collect(self) -> Iterable[Metric]:
        for name, text, value in (
            ("entries", "Entries of the kernel's conntrack, of all kinds", conntrack.count()),
            ("max_entries", "Maximum number of entries of conntrack", conntrack.limit()),
        ):
            yield GaugeMetricFamily(f"ebpflb_conntrack_{name}", text, value)
        text = "Times that the nft table of the engine netfilter was put back"
        yield CounterMetricFamily("ebpflb_conntrack_table_restored_total", text, self._restored())
        text = "Flows that conntrack keeps, as of the last count"
        flows = GaugeMetricFamily("ebpflb_conntrack_flows", text, labels=["protocol"])
        counted = self._flows.latest()
        if counted is not None:
            for protocol in _PROTOCOLS:
                flows.add_metric([protocol.name], counted.by_protocol[protocol])
        yield flows

    def open_flows(self) -> Mapping[Frontend, int]:
        """Return the open flows of each frontend, as of the last count."""
        counted = self._flows.latest()
        return counted.open if counted else {}

    def wait(self) -> None:
        """Return when the running count has ended."""
        self._flows.wait()


MAX_SERIES = 50


class StatusCollector:
    """Metrics of the last published status."""

    def __init__(self, status: Callable[[], AgentStatus]) -> None:
        self._status = status

    def collect(self) -> Iterable[Metric]:
        status = self._status()
        yield _build()
        yield _packet_path(status)
        yield _conditions(status)
        yield from _state(status)
        yield from _not_programmed(status)
        yield _invalid_objects(status)
        text = "1 for each source of objects that cannot be read now"
        errors = GaugeMetricFamily("ebpflb_source_error", text, labels=["source"])
        for source in status.source_errors:
            errors.add_metric([source], 1)
        yield errors


def _build() -> Metric:
    text = "Always 1: the version, its commit and its date, and the layout of the maps"
    labels = ["version", "commit", "build_date", "layout"]
    metric = GaugeMetricFamily("ebpflb_build_info", text, labels=labels)
    metric.add_metric([VERSION, COMMIT, BUILD_DATE, layout_hash()], 1)
    return metric


def _packet_path(status: AgentStatus) -> Metric:
    """Return the metric, without a sample before the agent's first status."""
    text = "Always 1: the engine that translates packets, and why"
    metric = GaugeMetricFamily("ebpflb_packet_path_info", text, labels=["engine", "reason"])
    if status.packet_path:
        metric.add_metric([status.packet_path.engine, status.packet_path.reason], 1)
    return metric


def _conditions(status: AgentStatus) -> Metric:
    text = "1 for each condition that `ebpflb status` or /readyz names now"
    metric = GaugeMetricFamily("ebpflb_condition", text, labels=["condition"])
    for each in conditions(status):
        metric.add_metric([each.cause], 1)
    return metric


def _state(status: AgentStatus) -> Iterator[Metric]:
    not_served, to_come = len(status.devices_not_served), status.devices_to_come
    for name, text, value in (
        ("service_ports", "Service ports that are programmed", status.service_ports),
        ("backends", "Backends of all service ports", status.backends),
        ("devices_not_served", "Devices whose packets are not served", not_served),
        ("devices_to_come", "Devices that still wait for their first programs", to_come),
        (
            "ports_not_open",
            "Ports of the agent on which it cannot listen, usually because another process "
            "holds them",
            len(status.ports_not_open),
        ),
        ("audit_outstanding", "Number of differences from the plan now", len(status.drift)),
        (
            "masquerade_ports_reserved",
            "Whether the ports of --masquerade-ports are reserved on this node",
            status.ports_not_reserved is None,
        ),
    ):
        yield GaugeMetricFamily(f"ebpflb_{name}", text, value)


def _not_programmed(status: AgentStatus) -> Iterator[Metric]:
    text = "Services with a port that does not fit: its existing entries stay in place"
    yield GaugeMetricFamily("ebpflb_services_not_programmed", text, len(status.not_programmed))
    text = f"1 for each of these Services, at most {MAX_SERIES}"
    each = GaugeMetricFamily("ebpflb_service_not_programmed", text, labels=["namespace", "name"])
    for service in islice(sorted(status.not_programmed), MAX_SERIES):
        each.add_metric(service.split("/"), 1)
    yield each


def _invalid_objects(status: AgentStatus) -> Metric:
    kinds = Counter(name.partition(" ")[0] for name in status.invalid_objects)
    text = "Invalid objects; the last good state of each stays in use where there was one"
    metric = GaugeMetricFamily("ebpflb_objects_invalid", text, labels=["kind"])
    for kind in Kind:
        metric.add_metric([kind], kinds[kind])
    return metric
