# SPDX-License-Identifier: Apache-2.0
"""All metrics of an agent (docs/metrics.md), and their exposition.

The agent counts the metrics in TOLD as it works; the metrics in READ are read at each scrape. One
that cannot be read is left out and counted as a failure; the others are shown.

Names, labels and buckets that begin with kubeproxy_ are kube-proxy's (kube-proxy.md 14); those of
kubernetes_ and rest_client_ are of Kubernetes' component-base 1.36. One agent serves both families,
and one sync writes both: it is observed once for each family, as in a dual-stack kube-proxy.
"""

import collections
import logging
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice, product
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ebpflb.entries.services import protocol_name
from ebpflb.errors import EbpflbError
from ebpflb.kernel.datapath import Datapath
from ebpflb.kernel.maps.layout import VERDICTS, layout_hash
from ebpflb.kernel.maps.records import ServiceCounters
from ebpflb.kernel.maps.sweep import FLOW_MAPS, FlowTable
from ebpflb.kernel.netfilter import conntrack
from ebpflb.model import services
from ebpflb.model.addresses import Family
from ebpflb.model.annotations import RESET_KINDS
from ebpflb.model.endpoints import TrafficPolicy
from ebpflb.model.events import Drift, Key, Kind, Part
from ebpflb.model.services import PortName, Protocol
from ebpflb.options import SeriesOf
from ebpflb.plan.canary import is_canary
from ebpflb.plan.planner import Planner
from ebpflb.plan.service_entries import ServiceEntries
from ebpflb.serve.conditions import conditions
from ebpflb.serve.health import Health
from ebpflb.serve.status import AgentStatus
from ebpflb.version import BUILD_DATE, COMMIT, VERSION

# What is read at each scrape: of maps, status, conntrack and Services.
#
# The cost of a scrape does not depend on the number of Services, endpoints and flows.
#
# Exact are verdicts, events of flow entries, the entries of maps that the agent writes (counted by
# the planner), of the small maps, which are read whole, and of the map sockets. The entries of
# tcp_flows and other_flows are from the last sweep, at most ten seconds ago.
#
# The series of single service ports, if --service-metrics asks for them, read counters that the
# programs have of every Service anyway.

MAX_SERIES = 50  # Services by name: the reason is a full map, and `ebpflb status` names the others
# Small maps: read at each scrape.
COUNTED_WHOLE = "node_addresses", "own_addresses", "link_addresses", "devices", "service_ranges"

# By name and labels, as docs/metrics.md has them; a name that ends in "_total" is a counter's.
READ = {
    "ebpflb_verdicts_total{verdict}": "Outcomes of socket calls and packets",
    "ebpflb_map_entries{map}": "Entries of a map",
    "ebpflb_map_max_entries{map}": "Maximum number of entries of a map",
    # Entries, not flows: a flow has two, or four if it is masqueraded.
    "ebpflb_flow_entries_created_total{map}": "Flow entries created by packets",
    "ebpflb_flow_entries_deleted_total{map}": "Flow entries deleted by packets of a newer flow",
    "ebpflb_flow_entries_refused_total{map}": "Flow entries not created: the map was full",
    "ebpflb_flow_entries_swept_total{map}": "Flow entries deleted by the agent: closed or idle",
    "ebpflb_flow_entries_evicted_total{map}": "Flow entries evicted, as of the last sweep",
    "ebpflb_half_open_flows_displaced_total{map}": "Half-open flows deleted by a newer flow",
    "ebpflb_healthy": "Whether every change has been applied in time, as /livez reports it",
    "ebpflb_ready": "Whether programs and every Service are in place, as /readyz reports it",
    "ebpflb_inbox_oldest_seconds": "How long the oldest change has waited for the agent's loop",
    "ebpflb_events_dropped_total": "Events that were not written to the API server",
    "ebpflb_node_local_listeners{state}": "Node-local listeners, by whether they answer",
    "ebpflb_endpoints_set_aside": "Endpoints set aside: connections to them fail to open",
    "ebpflb_endpoint_set_aside_total": "Times that an endpoint was set aside",
    "ebpflb_connections_moved_total": "Idle connections that were ended so that they move",
    "ebpflb_build_info{version,commit,build_date,layout}": "Always 1: version and layout of maps",
    "ebpflb_packet_path_info{engine,reason}": "Always 1: what translates packets, and why",
    "ebpflb_condition{condition}": "1 for each condition that `ebpflb status` or /readyz names now",
    "ebpflb_service_ports": "Service ports that are programmed",
    "ebpflb_backends": "Backends of all service ports",
    "ebpflb_devices_not_served": "Devices whose packets are not served",
    "ebpflb_devices_to_come": "Devices that still wait for their first programs",
    "ebpflb_ports_not_open": "Ports of the agent on which it cannot listen",
    "ebpflb_audit_outstanding": "Number of differences from the plan now",
    "ebpflb_masquerade_ports_reserved": "Whether the ports of --masquerade-ports are reserved",
    "ebpflb_services_not_programmed": "Services with a port that does not fit into the maps",
    "ebpflb_service_not_programmed{namespace,name}": "1 for each of these Services, at most "
    f"{MAX_SERIES}",
    "ebpflb_objects_invalid{kind}": "Invalid objects, whose last good state stays in use",
    "ebpflb_source_error{source}": "1 for each source of objects that cannot be read now",
    "ebpflb_conntrack_entries": "Entries of the kernel's conntrack, of all kinds",
    "ebpflb_l2_addresses{state}": "Load balancer addresses of --l2-pool: announced by this "
    "cluster, and owned by this node",
    "ebpflb_l2_moves_total": "Times that this node has begun to answer for an address",
    "ebpflb_l2_conflicts": "Addresses of --l2-pool that another station has too",
    "ebpflb_l2_addresses_missing": "Services that lack an address, as the agent that writes them "
    "sees it",
    "ebpflb_hand_over_blocked": "Other nodes that no request is handed to, and addresses whose "
    "requests a rule drops (--hand-over)",
    "ebpflb_conntrack_max_entries": "Maximum number of entries of conntrack",
    "ebpflb_conntrack_table_restored_total": "Times that the engine's nft table was put back",
    "ebpflb_service_connections_total{namespace,name,port,protocol}": "New connections and flows",
    "ebpflb_service_refused_total{namespace,name,port,protocol,verdict}": "Connections and packets "
    "that got none, because the Service has none here",
    "ebpflb_service_ports_without_series": "Service ports without series, over --service-metrics",
}
Samples = float | Mapping[Any, float]
"""The value of a metric, or with labels each series' value by the values of its labels."""
Look = Callable[[], Mapping[str, Samples]]
"""Returns metrics by name. Raises EbpflbError or OSError."""


def parse_spec(spec: str) -> tuple[str, tuple[str, ...]]:
    """Return name and labels of a metric that is written as in READ."""
    name, _, labels = spec.removesuffix("}").partition("{")
    return name, tuple(labels.split(",")) if labels else ()


_DESCRIBED = {name: (labels, READ[spec]) for spec in READ for name, labels in [parse_spec(spec)]}


def metric(name: str, samples: Samples) -> Metric:
    """Return the metric with these samples."""
    kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
    labels, text = _DESCRIBED[name]
    made = kind(name, text, labels=labels)
    series = samples if isinstance(samples, Mapping) else {(): samples}
    for values, number in series.items():
        made.add_metric((values,) if isinstance(values, str) else values, number)
    return made


class Sources(NamedTuple):
    """What is read at each scrape; the agent may replace its planner.

    ``counts`` has the metrics that parts of the agent count, by name. ``labels_of`` returns the
    labels of a Service, as ``show_labels`` writes them.
    """

    datapath: Datapath
    planner: Callable[[], Planner]
    status: Callable[[], AgentStatus]
    health: Health
    counts: Callable[[], dict[str, Samples]]
    series: SeriesOf | None = None
    labels_of: Callable[[Key], str] = lambda _: ""


class Reading:
    """Read ``sources``."""

    def __init__(self, sources: Sources) -> None:
        self._sources, self._maps = sources, sources.datapath.maps
        self._tables = [FlowTable(self._maps, name) for name in FLOW_MAPS]

    def groups(self) -> dict[str, Look]:
        """Return what reads each group of metrics: all of them are shown, or none."""
        given = self._sources
        found: dict[str, Look] = {
            "maps": self._look_at_maps,
            "status": lambda: look_at_agent(given.status(), given.health) | given.counts(),
            "conntrack": self._look_at_conntrack,
        }
        if given.series:
            found["services"] = SeriesReader(given, given.series).look
        return found

    def _look_at_maps(self) -> dict[str, Samples]:
        entries = self._entries()
        return {
            "ebpflb_verdicts_total": {
                name: self._maps["verdicts"].get(number)[0] for number, name in VERDICTS.items()
            },
            "ebpflb_map_entries": entries,
            "ebpflb_map_max_entries": {name: self._maps[name].spec.entries for name in entries},
            **self._flow_entries(),
        }

    def _entries(self) -> dict[str, float]:
        _, _, in_hash = self._maps["sockets_full"].get(0)
        return {
            **self._sources.planner().space.used_entries(),
            **{name: self._maps[name].count() for name in COUNTED_WHOLE},
            **{table.name: table.numbers.entries for table in self._tables},
            "sockets": in_hash,
        }

    def _flow_entries(self) -> dict[str, Samples]:
        found: dict[str, dict[str, float]] = {}
        for table in self._tables:
            created, deleted, refused, displaced = self._maps["flow_stats"].get(table.number)
            swept, _, evicted = table.numbers
            for name, number in {
                "flow_entries_created": created,
                "flow_entries_deleted": deleted,
                "flow_entries_refused": refused,
                "flow_entries_swept": swept,
                "flow_entries_evicted": evicted,
                "half_open_flows_displaced": displaced,
            }.items():
                found.setdefault(f"ebpflb_{name}_total", {})[table.name] = number
        return {**found}

    def _look_at_conntrack(self) -> dict[str, Samples]:
        return {
            "ebpflb_conntrack_entries": conntrack.count(),
            "ebpflb_conntrack_max_entries": conntrack.limit(),
        }


def look_at_agent(status: AgentStatus, health: Health) -> dict[str, Samples]:
    """Return the metrics of the last published status, and of the agent's loop."""
    kinds = collections.Counter(name.partition(" ")[0] for name in status.invalid_objects)
    path = status.packet_path
    named = islice(sorted(status.not_programmed), MAX_SERIES)
    return {
        "ebpflb_healthy": health.healthy,
        "ebpflb_ready": health.ready,
        "ebpflb_inbox_oldest_seconds": health.pulse.waiting,
        "ebpflb_build_info": {(VERSION, COMMIT, BUILD_DATE, layout_hash()): 1},
        "ebpflb_packet_path_info": {(path.engine, path.reason): 1} if path else {},
        "ebpflb_condition": dict.fromkeys((each.cause for each in conditions(status)), 1),
        "ebpflb_service_ports": status.service_ports,
        "ebpflb_backends": status.backends,
        "ebpflb_devices_not_served": len(status.devices_not_served),
        "ebpflb_devices_to_come": status.devices_to_come,
        "ebpflb_ports_not_open": len(status.ports_not_open),
        "ebpflb_audit_outstanding": len(status.drift),
        "ebpflb_masquerade_ports_reserved": status.ports_not_reserved is None,
        "ebpflb_services_not_programmed": len(status.not_programmed),
        "ebpflb_service_not_programmed": {tuple(name.split("/")): 1 for name in named},
        "ebpflb_objects_invalid": {kind: kinds[kind] for kind in Kind},
        "ebpflb_source_error": dict.fromkeys(status.source_errors, 1),
        **_look_at_addresses(status),
        **({"ebpflb_hand_over_blocked": len(status.not_handed_to)} if status.hand_over else {}),
    }


def _look_at_addresses(status: AgentStatus) -> dict[str, Samples]:
    """Return the metrics of load balancer addresses; none without --l2-pool."""
    if not status.addresses:
        return {}
    owned = sum(node == status.node for node in status.address_owners.values())
    return {
        "ebpflb_l2_addresses": {"announced": len(status.address_owners), "owned": owned},
        "ebpflb_l2_moves_total": status.address_moves,
        "ebpflb_l2_conflicts": len(status.address_conflicts),
        "ebpflb_l2_addresses_missing": len(status.addresses_missing),
    }


# Which service ports have series of their own (docs/metrics.md).
#
# The number is bounded, because each series costs memory in every Prometheus. A series that comes
# and goes is of little use, so a service port that has series keeps them until another one is
# clearly busier.

_KEPT = 0.75  # of a score, from one choice to the next
_AHEAD = 2  # how many times as busy another service port must be to take the place of one


class Port(NamedTuple):
    """A service port in both families."""

    namespace: str
    service: str
    port: str
    protocol: Protocol


class Busiest:
    """The service ports with the most new connections lately."""

    def __init__(self, limit: int) -> None:
        self.ports: tuple[Port, ...] = ()
        self._limit = limit
        self._totals: Mapping[Port, int] = {}
        self._scores: Mapping[Port, float] = {}

    def choose(self, totals: Mapping[Port, int]) -> None:
        """Set ``ports``; ``totals`` are the connections of all service ports until now.

        A total that has become smaller belongs to a new Service of this name. The first totals may
        have grown for months: they decide the first choice only.
        """
        scores = {port: self._score(port, total) for port, total in totals.items()}
        self._scores = scores if self._totals else {}
        self._totals = totals
        ranks = scores | {port: _AHEAD * scores[port] for port in self.ports if port in totals}
        self.ports = tuple(sorted(ranks, key=lambda port: (-ranks[port], port))[: self._limit])

    def _score(self, port: Port, total: int) -> float:
        former = self._totals.get(port, 0)
        more = total - former if total >= former else total
        return _KEPT * self._scores.get(port, 0.0) + more


CHOICE_INTERVAL = 60.0  # seconds between two choices of service ports, if metrics are scraped


class SeriesReader:
    """Choose the service ports that have series, and read their counters."""

    def __init__(self, sources: Sources, series: SeriesOf) -> None:
        self._sources, self._maps = sources, sources.datapath.maps
        self._selector, self._busiest = series.selector, Busiest(series.limit)
        self._choice_due = 0.0  # of the monotonic clock
        self._left_out = 0

    def look(self) -> dict[str, Samples]:
        """Read the counters of the chosen service ports. Raises KernelError."""
        if time.monotonic() >= self._choice_due:
            self._choose()
            self._choice_due = time.monotonic() + CHOICE_INTERVAL
        ports = {_words(port): entries for port, entries in self._entries()}
        counters = self._counters(it.id for each in ports.values() for it in each)
        own = {port: [counters[it.id] for it in each] for port, each in ports.items()}
        return {
            "ebpflb_service_connections_total": {
                port: sum(it.chosen for it in each) for port, each in own.items()
            },
            "ebpflb_service_refused_total": {
                (*port, verdict): sum(getattr(it, verdict) for it in each)
                for port, each in own.items()
                for verdict in ("refused", "no_local_endpoint")
            },
            "ebpflb_service_ports_without_series": self._left_out,
        }

    def _choose(self) -> None:
        ids: dict[Port, list[int]] = {}
        for name, entries in self._sources.planner().actual.copy().items():
            labels = self._sources.labels_of(name.owner)
            if services.meets(self._selector, labels) and not is_canary(name):
                ids.setdefault(Port(*name[:4]), []).append(entries.id)
        counts = self._counters(id for each in ids.values() for id in each)
        self._busiest.choose(
            {port: sum(_total(counts[id]) for id in each) for port, each in ids.items()}
        )
        self._left_out = len(ids) - len(self._busiest.ports)

    def _entries(self) -> Iterable[tuple[Port, list[ServiceEntries]]]:
        """Return the chosen service ports that still exist, with their entries, by family."""
        actual = self._sources.planner().actual
        for port in self._busiest.ports:
            entries = [actual.get(PortName(*port, family)) for family in Family]
            if existing := [it for it in entries if it]:
                yield port, existing

    def _counters(self, ids: Iterable[int]) -> dict[int, ServiceCounters]:
        found = self._maps["service_stats"].get_many({*ids})
        return {id: ServiceCounters(*counts) for id, counts in found.items()}


def _total(counts: ServiceCounters) -> int:
    return counts.chosen + counts.refused + counts.no_local_endpoint


def _words(port: Port) -> tuple[str, ...]:
    return *port[:3], protocol_name(port.protocol)


# What the agent counts as it works.

NO_RESPONSE = "<error>"  # client-go's code for a request without a response

_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}
_MAJOR, _MINOR, *_ = VERSION.split(".")
_BUILD = {
    "major": _MAJOR,
    "minor": _MINOR,
    "git_version": f"v{VERSION}",
    "platform": f"linux/{_MACHINES.get(platform.machine(), platform.machine())}",
    "git_commit": COMMIT,
    "build_date": BUILD_DATE,
    **dict.fromkeys(("git_tree_state", "go_version", "compiler"), ""),  # a Go program has them
}

_RULES, _STALE = "kubeproxy_sync_proxy_rules", "kubeproxy_conntrack_reconciler"
_SYNC = f"{_RULES}_duration_seconds"
_FULL_SYNC = "kubeproxy_sync_full_proxy_rules_duration_seconds"
_PARTIAL_SYNC = "kubeproxy_sync_partial_proxy_rules_duration_seconds"
_PROGRAMMING = "kubeproxy_network_programming_duration_seconds"
_NO_LOCAL = f"{_RULES}_no_local_endpoints_total"
_REQUESTS = "rest_client_request_duration_seconds"
_SYNC_SECONDS = tuple(0.001 * 2**power for power in range(15))
_BUCKETS: Mapping[str, Sequence[float]] = {
    **dict.fromkeys(
        (_SYNC, _FULL_SYNC, _PARTIAL_SYNC, f"{_STALE}_sync_duration_seconds"), _SYNC_SECONDS
    ),
    _PROGRAMMING: (0.25, 0.5, *range(1, 60), *range(60, 120, 5), *range(120, 301, 30)),
    _REQUESTS: (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60),
}

log = logging.getLogger(__name__)

disable_created_metrics()  # type: ignore[no-untyped-call]  # kube-proxy has no such series


# By name and labels, as in docs/metrics.md. A name in _BUCKETS is a histogram's, one that ends
# in "_total" a counter's, and any other a gauge's.
TOLD = {
    f"{_SYNC}{{ip_family}}": "Duration of each sync, full or partial",
    f"{_FULL_SYNC}{{ip_family}}": "Duration of each sync of all services",
    f"{_PARTIAL_SYNC}{{ip_family}}": "Duration of each sync of only the services that changed",
    f"{_RULES}_last_timestamp_seconds{{ip_family}}": "Time of the last sync that succeeded",
    f"{_RULES}_last_queued_timestamp_seconds{{ip_family}}": "Time of the last request for a sync",
    f"{_PROGRAMMING}{{ip_family}}": "From the change of a pod or Service to the end of its sync",
    f"{_RULES}_endpoint_changes_pending": "Changes of EndpointSlices that are not synced yet",
    f"{_RULES}_endpoint_changes_total": "Events about EndpointSlices",
    f"{_RULES}_service_changes_pending": "Changes of Services that are not synced yet",
    f"{_RULES}_service_changes_total": "Events about Services, each counted once for each family",
    f"{_NO_LOCAL}{{traffic_policy,ip_family}}": "Service ports of policy Local without endpoint",
    "kubeproxy_proxy_healthz_total{code}": "Responses of /healthz on port 10256",
    "kubeproxy_proxy_livez_total{code}": "Responses of /livez on port 10256",
    f"{_STALE}_sync_duration_seconds{{ip_family}}": "Duration of each search for stale UDP flows",
    f"{_STALE}_deleted_entries_total{{ip_family}}": "Stale UDP flows that were ended",
    f"kubernetes_build_info{{{','.join(_BUILD)}}}": "Always 1: the version of ebpflb",
    "kubernetes_feature_enabled{name,stage}": "Whether a feature gate is enabled, and its stage",
    "rest_client_requests_total{code,method,host}": "Requests to the API server",
    f"{_REQUESTS}{{verb,host}}": "Time until the API server responded",
    "ebpflb_sync_failures_total": "Syncs that failed",
    "ebpflb_socket_destroy_supported": "Whether the kernel can destroy sockets (INET_DIAG_DESTROY)",
    "ebpflb_connections_reset_total{kind}": "Connections that were reset, as on-removal asks for",
    "ebpflb_node_readiness_writes_total{result}": "Writes of the Node's readiness to the API",
    "ebpflb_audit_drift_total{part}": "Times that the audit found a difference from the plan",
    "ebpflb_watches_silent_total{kind}": "Watches that were silent, and opened again",
    "ebpflb_scrape_errors_total{what}": "Scrapes at which a part of the metrics could not be read",
}
SLIS = {
    "kubernetes_healthcheck{name,type}": "Result of the last health check: 1 is success",
    "kubernetes_healthchecks_total{name,type,status}": "Health checks by result",
}
# Values of labels whose series exist from the start, at zero.
_VALUES: Mapping[str, Iterable[object]] = {
    "ip_family": Family,
    "traffic_policy": TrafficPolicy,
    "code": (200, 503),
    "result": ("success", "error"),
    "part": Part,
}


class Exposition(NamedTuple):
    """A body and its Content-Type."""

    body: bytes
    content_type: str


_Any = Counter | Gauge | Histogram
_Kind = TypeVar("_Kind", Counter, Gauge, Histogram)


class Metrics:
    """Safe to call from any thread."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """``clock`` returns seconds since the epoch."""
        self.registry, self.slis = CollectorRegistry(), CollectorRegistry()
        self._clock = clock
        for library in (ProcessCollector, GCCollector, PlatformCollector):
            library(registry=self.registry)
        self._told: dict[str, _Any] = {}
        self._series: dict[tuple[object, ...], _Any] = {}  # by name and labels: found once
        for texts, registry in ((TOLD, self.registry), (SLIS, self.slis)):
            for spec, text in texts.items():
                name, labels = parse_spec(spec)
                self._told[name] = _made(name, labels, text, registry)
        for kind in RESET_KINDS:
            self._add("ebpflb_connections_reset_total", 0, kind)
        for kind in Kind:
            self._add("ebpflb_watches_silent_total", 0, kind)
        self._set("kubernetes_build_info", 1, *_BUILD.values())
        self._lock = threading.Lock()  # of the collectors
        self._collectors: list[Collector] = []

    def service_changes(self, count: int) -> None:
        """Count events about Services."""
        self._add(f"{_RULES}_service_changes_total", count * len(Family))

    def endpoint_changes(self, count: int) -> None:
        """Count events about EndpointSlices, each of which is of one family."""
        self._add(f"{_RULES}_endpoint_changes_total", count)

    def pending(self, services: int, slices: int) -> None:
        """Set the number of changed Services and EndpointSlices that wait for a sync."""
        self._set(f"{_RULES}_service_changes_pending", services)
        self._set(f"{_RULES}_endpoint_changes_pending", slices)

    def queued(self) -> None:
        """Note a requested sync. The agent also calls this when it starts."""
        for family in Family:
            self._set(f"{_RULES}_last_queued_timestamp_seconds", self._clock(), family)

    def synced(self, seconds: float, *, full: bool) -> None:
        """Note a sync that succeeded after ``seconds``."""
        self._observe_sync(seconds, full=full)
        for family in Family:
            self._set(f"{_RULES}_last_timestamp_seconds", self._clock(), family)

    def failed(self, seconds: float, *, full: bool) -> None:
        """Note that a sync failed after ``seconds``; its changes are still pending."""
        self._observe_sync(seconds, full=full)
        self._add("ebpflb_sync_failures_total")

    def programmed(self, family: Family, latencies: Iterable[float]) -> None:
        """Observe the seconds from a change's trigger to its programming (kube-proxy.md 16.4)."""
        for latency in latencies:
            self._of(Histogram, _PROGRAMMING, family).observe(latency)

    def no_local_endpoints(self, counts: Mapping[TrafficPolicy, Mapping[Family, int]]) -> None:
        """Set the numbers of service ports without an endpoint here although a policy is Local."""
        for policy, families in counts.items():
            for family, count in families.items():
                self._set(_NO_LOCAL, count, policy, family)

    def stale_flows_ended(self, family: Family, seconds: float, entries: int) -> None:
        """Observe a search for stale UDP flows, its seconds and the number of ended flows."""
        self._of(Histogram, f"{_STALE}_sync_duration_seconds", family).observe(seconds)
        self._add(f"{_STALE}_deleted_entries_total", entries, family)

    def answered(self, path: str, code: int) -> None:
        """Count a response of /healthz or /livez on port 10256."""
        self._add(f"kubeproxy_proxy_{path.removeprefix('/')}_total", 1, code)

    def gate(self, name: str, stage: str, *, enabled: bool) -> None:
        """Set one feature gate and its stage as Kubernetes 1.36 writes it, such as "DEPRECATED"."""
        self._set("kubernetes_feature_enabled", enabled, name, stage)

    def request(self, method: str, url: str, code: int | None, seconds: float) -> None:
        """Count one request to the API server; ``url`` is any URL of the server.

        ``code`` is None without a response; a watch ends when its response begins.
        """
        host = urlsplit(url).netloc
        shown = NO_RESPONSE if code is None else code
        self._add("rest_client_requests_total", 1, shown, method, host)
        self._of(Histogram, _REQUESTS, method, host).observe(seconds)

    def check(self, name: str, type: str, *, ok: bool) -> None:
        """Count one check of ``type`` healthz or livez."""
        self._set("kubernetes_healthcheck", ok, name, type)
        self._add("kubernetes_healthchecks_total", 1, name, type, "success" if ok else "error")

    def socket_destroy_supported(self, supported: bool) -> None:
        """Set whether this kernel can destroy sockets (INET_DIAG_DESTROY)."""
        self._set("ebpflb_socket_destroy_supported", supported)

    def node_written(self, success: bool) -> None:
        """Count a write of --node-readiness to the Node."""
        self._add("ebpflb_node_readiness_writes_total", 1, "success" if success else "error")

    def connections_reset(self, kind: str, count: int) -> None:
        """Count reset connections to removed endpoints."""
        self._add("ebpflb_connections_reset_total", count, kind)

    def watch_silent(self, kind: str) -> None:
        """Count a watch that sent nothing for so long that it was opened again."""
        self._add("ebpflb_watches_silent_total", 1, kind)

    def drift_found(self, drifts: Iterable[Drift]) -> None:
        """Count differences that the audit found."""
        for drift in drifts:
            self._add("ebpflb_audit_drift_total", 1, drift.part)

    def read(self, sources: Sources) -> None:
        """Read these at each scrape from now on, until ``close``."""
        for what, look in Reading(sources).groups().items():
            failures = self._of(Counter, "ebpflb_scrape_errors_total", what)
            group = _AllOrNothing(look, failures)
            with self._lock:
                self._collectors.append(group)
                self.registry.register(group)

    def close(self) -> None:
        """Stop reading maps, programs and status; counters are still shown."""
        with self._lock:
            while self._collectors:
                self.registry.unregister(self._collectors.pop())

    def exposition(self, accept: str = "") -> Exposition:
        """Return /metrics, in the format of the Accept header.

        Text unless OpenMetrics is accepted.
        """
        with self._lock:
            return _exposition(self.registry, accept)

    def slis_exposition(self, accept: str = "") -> Exposition:
        return _exposition(self.slis, accept)

    def _observe_sync(self, seconds: float, *, full: bool) -> None:
        for name, family in product((_SYNC, _FULL_SYNC if full else _PARTIAL_SYNC), Family):
            self._of(Histogram, name, family).observe(seconds)

    def _add(self, name: str, by: int = 1, *labels: object) -> None:
        self._of(Counter, name, *labels).inc(by)

    def _set(self, name: str, value: float, *labels: object) -> None:
        self._of(Gauge, name, *labels).set(value)

    def _of(self, kind: type[_Kind], name: str, *labels: object) -> _Kind:
        made = self._series.get((name, *labels))
        if made is None:
            made = self._told[name].labels(*labels) if labels else self._told[name]
            self._series[name, *labels] = made
        assert isinstance(made, kind)
        return made


def _made(name: str, labels: Sequence[str], text: str, registry: CollectorRegistry) -> _Any:
    """Return the metric, registered."""
    made: _Any
    if name in _BUCKETS:
        made = Histogram(name, text, labels, registry=registry, buckets=_BUCKETS[name])
    elif name.endswith("_total") and name != _NO_LOCAL:
        made = Counter(name, text, labels, registry=registry)
    else:
        made = Gauge(name, text, labels, registry=registry)
    for values in product(*(_VALUES.get(label, ()) for label in labels)) if labels else ():
        made.labels(*values)
    return made


class _AllOrNothing(Collector):
    """All metrics that ``look`` returns, or none if one of them cannot be read."""

    def __init__(self, look: Look, failures: Counter) -> None:
        self._look, self._failures = look, failures

    def collect(self) -> Iterable[Metric]:
        try:
            return [metric(name, samples) for name, samples in self._look().items()]
        except (EbpflbError, OSError) as error:
            self._failures.inc()
            log.warning("metrics: %s", error)
            return []


class _GoBounds:
    """Write whole bounds of buckets as Go does, for queries that name one: le="30", not "30.0"."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for each in self._registry.collect():
            if each.type == "histogram":
                for sample in each.samples:
                    if "le" in sample.labels:
                        sample.labels["le"] = sample.labels["le"].removesuffix(".0")
            yield each


def _exposition(registry: CollectorRegistry, accept: str) -> Exposition:
    """Return the exposition; in OpenMetrics the bounds of buckets keep their fraction."""
    encode, content_type = choose_encoder(accept)
    plain = content_type.startswith("text/plain")
    return Exposition(encode(_GoBounds(registry) if plain else registry), content_type)
