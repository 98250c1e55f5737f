# SPDX-License-Identifier: Apache-2.0
"""All metrics of an agent (docs/metrics.md), and their exposition.

The agent counts as it works; maps, hooks and its status are read at each scrape. Metrics that
cannot be read are left out and counted as failures, and the others are shown.
"""

import logging
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple
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
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ebpflb.errors import EbpflbError
from ebpflb.kernel.datapath import Datapath
from ebpflb.kernel.maps.bpf_map import Map
from ebpflb.kernel.maps.occupancy import Occupancy
from ebpflb.model import node_local
from ebpflb.model.annotations import RESET_KINDS
from ebpflb.model.busiest import SeriesOf
from ebpflb.model.drift import Drift, Part
from ebpflb.model.events import Kind
from ebpflb.plan.planner import Planner
from ebpflb.serve.health import Health
from ebpflb.serve.metrics_agent import (
    ConntrackCollector,
    HooksCollector,
    MapsCollector,
    StatusCollector,
)
from ebpflb.serve.metrics_kube_proxy import KubeProxyMetrics
from ebpflb.serve.metrics_services import Labels, OpenFlows, ServicesCollector
from ebpflb.serve.status import AgentStatus
from ebpflb.version import BUILD_DATE, COMMIT, VERSION

# The metrics that kube-proxy has from its libraries: build, process, feature gates, requests to the
# API server, and the health checks of /metrics/slis.
#
# Names, labels and buckets are those of Kubernetes' component-base 1.36.

REQUEST_SECONDS = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)
NO_RESPONSE = "<error>"  # client-go's code for a request without a response

_EMPTY_LABELS = ("git_tree_state", "go_version", "compiler")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def describe_process(registry: CollectorRegistry) -> None:
    """Register process_*, python_gc_* and python_info."""
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    PlatformCollector(registry=registry)


def describe_build(registry: CollectorRegistry) -> None:
    """Register kubernetes_build_info; labels that only a Go program has are empty."""
    major, minor = VERSION.split(".")[:2]
    machine = platform.machine()
    labels = {
        "major": major,
        "minor": minor,
        "git_version": f"v{VERSION}",
        "platform": f"linux/{_MACHINES.get(machine, machine)}",
        "git_commit": COMMIT,
        "build_date": BUILD_DATE,
        **dict.fromkeys(_EMPTY_LABELS, ""),
    }
    text = "Always 1: the version of ebpflb, in the labels of Kubernetes"
    Gauge("kubernetes_build_info", text, list(labels), registry=registry).labels(**labels).set(1)


log = logging.getLogger(__name__)

disable_created_metrics()  # type: ignore[no-untyped-call]  # kube-proxy has no such series


class Exposition(NamedTuple):
    """A body and its Content-Type."""

    body: bytes
    content_type: str


class Metrics(KubeProxyMetrics):
    """Safe to call from any thread."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        """``clock`` returns seconds since the epoch."""
        self.registry, self.slis = CollectorRegistry(), CollectorRegistry()
        super().__init__(self.registry, clock)
        describe_process(self.registry)
        describe_build(self.registry)
        self._declare()
        self._declare_endpoints()
        self._declare_as_kubernetes()
        self._lock = threading.Lock()  # of the collectors
        self._collectors: list[Collector] = []
        self.occupancy: Occupancy | None = None
        self.conntrack_counts: ConntrackCollector | None = None

    def failed(self, seconds: float, *, full: bool) -> None:
        """Note that a sync failed after ``seconds``; its changes are still pending."""
        super().failed(seconds, full=full)
        self._failures.inc()

    def gate(self, name: str, stage: str, *, enabled: bool) -> None:
        """Set one feature gate and its stage as Kubernetes 1.36 writes it, such as "DEPRECATED"."""
        self._gates.labels(name, stage).set(enabled)

    def request(self, method: str, url: str, code: int | None, seconds: float) -> None:
        """Count one request to the API server; ``url`` is any URL of the server.

        ``code`` is None without a response; a watch ends when its response begins.
        """
        host = urlsplit(url).netloc
        self._requests.labels(NO_RESPONSE if code is None else code, method, host).inc()
        self._request_seconds.labels(method, host).observe(seconds)

    def check(self, name: str, type: str, *, ok: bool) -> None:
        """Count one check of ``type`` healthz or livez."""
        self._last_check.labels(name, type).set(ok)
        self._checks.labels(name, type, "success" if ok else "error").inc()

    def socket_destroy_supported(self, supported: bool) -> None:
        """Set whether this kernel can destroy sockets (INET_DIAG_DESTROY)."""
        self._destroy_supported.set(supported)

    def node_written(self, success: bool) -> None:
        """Count a write of --node-readiness to the Node."""
        self._node_writes.labels("success" if success else "error").inc()

    def connections_reset(self, kind: str, count: int) -> None:
        """Count reset connections to removed endpoints."""
        self._reset.labels(kind).inc(count)

    def health(self, health: Health) -> None:
        """Read at each scrape what /livez and /readyz answer, and how long a message waits."""
        self._healthy.set_function(lambda: health.healthy)
        self._ready.set_function(lambda: health.ready)
        self._oldest.set_function(lambda: health.pulse.waiting)

    def set_aside(self, count: Callable[[], int], times: Callable[[], int]) -> None:
        """Call both at each scrape: endpoints that are set aside, and how often one was."""
        self._set_aside.set_function(lambda: count())
        self._times_set_aside.count = times

    def node_local(self, counts: Callable[[], Mapping[str, int]]) -> None:
        """Call ``counts`` at each scrape: node-local listeners by whether they answer."""
        for state in node_local.STATES:
            self._node_local.labels(state).set_function(partial(_count_of, counts, state))

    def watch_silent(self, kind: str) -> None:
        """Count a watch that sent nothing for so long that it was opened again."""
        self._watches_silent.labels(kind).inc()

    def drift_found(self, drifts: Iterable[Drift]) -> None:
        """Count differences that the audit found."""
        for drift in drifts:
            self._drift_found.labels(drift.part).inc()

    def events_dropped(self, count: Callable[[], int]) -> None:
        """Call ``count`` at each scrape: the number of events that the recorder dropped."""
        self._dropped.count = count

    def read(
        self,
        datapath: Datapath,
        planner: Callable[[], Planner],
        status: Callable[[], AgentStatus],
    ) -> None:
        """Read these at each scrape from now on, until ``close``."""
        self.occupancy = Occupancy(datapath.maps)
        self._register("maps", MapsCollector(datapath.maps, planner, self.occupancy))
        self._register("hooks", HooksCollector(datapath.state, lambda: datapath.programs))
        self._register("status", StatusCollector(status))

    def conntrack(self, maps: Mapping[str, Map], restored: Callable[[], int]) -> None:
        """Read conntrack at each scrape from now on, until ``close``."""
        self.conntrack_counts = ConntrackCollector(maps, restored)
        self._register("conntrack", self.conntrack_counts)

    def services(
        self,
        series: SeriesOf,
        maps: Mapping[str, Map],
        planner: Callable[[], Planner],
        labels: Labels,
    ) -> None:
        """Read these service ports at each scrape, after ``read`` and ``conntrack``."""
        occupancy, conntrack = self.occupancy, self.conntrack_counts
        assert occupancy is not None and conntrack is not None

        def open_flows() -> OpenFlows:
            return OpenFlows(occupancy.latest().open_flows, conntrack.open_flows())

        self._register("services", ServicesCollector(series, maps, planner, labels, open_flows))

    def close(self) -> None:
        """Stop reading maps, programs and status; counters are still shown."""
        with self._lock:
            while self._collectors:
                self.registry.unregister(self._collectors.pop())
        if self.occupancy is not None:
            self.occupancy.stop()
        if self.conntrack_counts is not None:
            self.conntrack_counts.wait()

    def exposition(self, accept: str = "") -> Exposition:
        """Return /metrics, in the format of the Accept header.

        Text unless OpenMetrics is accepted.
        """
        with self._lock:
            return _exposition(self.registry, accept)

    def slis_exposition(self, accept: str = "") -> Exposition:
        """Return /metrics/slis."""
        return _exposition(self.slis, accept)

    def _register(self, what: str, collector: Collector) -> None:
        whole = _AllOrNothing(collector, self._scrape_errors.labels(what))
        with self._lock:
            self._collectors.append(whole)
            self.registry.register(whole)

    def _declare_as_kubernetes(self) -> None:
        text = "Whether a supported feature gate is enabled, with its stage in Kubernetes"
        self._gates = Gauge(
            "kubernetes_feature_enabled", text, ["name", "stage"], registry=self.registry
        )
        text = "Requests to the API server by status code, method and host"
        self._requests = Counter(
            "rest_client_requests_total", text, ["code", "method", "host"], registry=self.registry
        )
        self._request_seconds = Histogram(
            "rest_client_request_duration_seconds",
            "Time until the API server responded, by verb and host",
            ["verb", "host"],
            buckets=REQUEST_SECONDS,
            registry=self.registry,
        )
        text, labels = "Result of the last health check: 1 is success", ["name", "type"]
        self._last_check = Gauge("kubernetes_healthcheck", text, labels, registry=self.slis)
        self._checks = Counter(
            "kubernetes_healthchecks_total",
            "Health checks by result",
            ["name", "type", "status"],
            registry=self.slis,
        )

    def _declare_endpoints(self) -> None:
        own = self.registry
        text = "Node-local listeners that Services name, by whether they answer"
        self._node_local = Gauge("ebpflb_node_local_listeners", text, ["state"], registry=own)
        for state in node_local.STATES:
            self._node_local.labels(state)
        text = "Endpoints that are set aside because connections from this node fail to open"
        self._set_aside = Gauge("ebpflb_endpoints_set_aside", text, registry=own)
        text = "Times that an endpoint was set aside"
        self._times_set_aside = _Counted("ebpflb_endpoint_set_aside_total", text)
        own.register(self._times_set_aside)

    def _declare(self) -> None:
        own = self.registry
        self._failures = Counter("ebpflb_sync_failures_total", "Syncs that failed", registry=own)
        text = (
            "Events that were not written: over the limits, refused, or the API server was "
            "not reachable"
        )
        self._dropped = _Counted("ebpflb_events_dropped_total", text)
        own.register(self._dropped)
        text = "Whether the kernel can destroy sockets (INET_DIAG_DESTROY)"
        self._destroy_supported = Gauge("ebpflb_socket_destroy_supported", text, registry=own)
        text = "Connections that were reset because their endpoint was removed or terminates"
        self._reset = Counter("ebpflb_connections_reset_total", text, ["kind"], registry=own)
        for kind in RESET_KINDS:
            self._reset.labels(kind)
        text = "Whether every change has been applied in time, as /livez reports it"
        self._healthy = Gauge("ebpflb_healthy", text, registry=own)
        text = "Whether this agent's programs and every service are in place, as /readyz reports it"
        self._ready = Gauge("ebpflb_ready", text, registry=own)
        text = "How long the oldest change has waited for the agent's loop"
        self._oldest = Gauge("ebpflb_inbox_oldest_seconds", text, registry=own)
        self._declare_counters()

    def _declare_counters(self) -> None:
        own = self.registry
        text = "Writes of the Node's readiness to the API server (--node-readiness)"
        name = "ebpflb_node_readiness_writes_total"
        self._node_writes = Counter(name, text, ["result"], registry=own)
        for result in ("success", "error"):
            self._node_writes.labels(result)
        text = "Times that the audit found a difference from the plan"
        self._drift_found = Counter("ebpflb_audit_drift_total", text, ["part"], registry=own)
        for part in Part:
            self._drift_found.labels(part)
        text = "Watches that were opened again because they sent nothing for too long"
        self._watches_silent = Counter("ebpflb_watches_silent_total", text, ["kind"], registry=own)
        for kind in Kind:
            self._watches_silent.labels(kind)
        text = "Scrapes at which a part of the metrics could not be read"
        self._scrape_errors = Counter("ebpflb_scrape_errors_total", text, ["what"], registry=own)


def _count_of(counts: Callable[[], Mapping[str, int]], state: str) -> int:
    return counts()[state]


class _Counted(Collector):
    """A counter without labels that another object counts."""

    count: Callable[[], int] = staticmethod(lambda: 0)

    def __init__(self, name: str, text: str) -> None:
        self._name, self._text = name, text

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(self._name, self._text, self.count())


class _AllOrNothing(Collector):
    """All metrics of a collector, or none if one of them cannot be read."""

    def __init__(self, collector: Collector, failures: Counter) -> None:
        self._collector, self._failures = collector, failures

    def collect(self) -> Iterable[Metric]:
        try:
            return list(self._collector.collect())
        except (EbpflbError, OSError) as error:
            self._failures.inc()
            log.warning("metrics: %s", error)
            return []


class _GoBounds:
    """Write whole bounds of buckets as Go does, for queries that name one: le="30", not "30.0"."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for metric in self._registry.collect():
            if metric.type == "histogram":
                for sample in metric.samples:
                    if "le" in sample.labels:
                        sample.labels["le"] = sample.labels["le"].removesuffix(".0")
            yield metric


def _exposition(registry: CollectorRegistry, accept: str) -> Exposition:
    """Return the exposition; in OpenMetrics the bounds of buckets keep their fraction."""
    encode, content_type = choose_encoder(accept)
    plain = content_type.startswith("text/plain")
    return Exposition(encode(_GoBounds(registry) if plain else registry), content_type)
