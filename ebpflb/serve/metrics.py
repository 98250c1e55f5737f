# SPDX-License-Identifier: Apache-2.0
"""All metrics of an agent (docs/metrics.md), and their exposition.

The agent counts those of TOLD as it works; those of metrics_read are read at each scrape. Metrics
that cannot be read are left out and counted as failures, and the others are shown.

Names, labels and buckets that begin with kubeproxy_ are kube-proxy's (kube-proxy.md 14); those of
kubernetes_ and rest_client_ are of Kubernetes' component-base 1.36. One agent serves both families,
and one sync writes both: it is observed once for each family, as in a dual-stack kube-proxy.
"""

import logging
import platform
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple, TypeVar
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
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ebpflb.errors import EbpflbError
from ebpflb.model.addresses import Family
from ebpflb.model.annotations import RESET_KINDS
from ebpflb.model.endpoints import TrafficPolicy
from ebpflb.model.events import Drift, Kind, Part
from ebpflb.serve.metrics_read import Look, Reading, Sources, metric, parse_spec
from ebpflb.version import BUILD_DATE, COMMIT, VERSION

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
