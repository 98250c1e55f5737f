# SPDX-License-Identifier: Apache-2.0
"""The metrics that dashboards for kube-proxy use, with kube-proxy's names, labels and buckets.

See kube-proxy.md 14. One agent serves both families, and one sync writes both: it is observed once
for each family, as in a dual-stack kube-proxy. Every series exists from the start, at zero. Gauges
are read on request: a sync stores a number, not a series.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import product
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ebpflb.model.addresses import Family
from ebpflb.model.endpoints import TrafficPolicy

SYNC_SECONDS = tuple(0.001 * 2**power for power in range(15))
PROGRAMMING_SECONDS = (0.25, 0.5, *range(1, 60), *range(60, 120, 5), *range(120, 301, 30))
CODES = (200, 503)

_FAMILIES = tuple(map(str, Family))


class KubeProxyMetrics:
    """The agent's syncs and health responses. Safe to call from any thread."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.time) -> None:
        """``clock`` returns seconds since the epoch."""
        self._registry, self._clock = registry, clock
        self._declare_syncs()
        self._declare_changes()
        self._healthz = self._response_counter("healthz", "/healthz on port 10256")
        self._livez = self._response_counter("livez", "/livez on port 10256")
        self._stale_flow_searches = self._histogram(
            "conntrack_reconciler_sync_duration_seconds",
            "Duration of each search for stale UDP flows, which are ended",
            SYNC_SECONDS,
        )
        self._stale_flows_ended = self._counter(
            "conntrack_reconciler_deleted_entries_total",
            "Stale UDP flows that were ended: flow entries, sockets and conntrack entries",
        )

    def service_changes(self, count: int) -> None:
        """Count events about Services."""
        if count:
            self._service_events.inc(count * len(_FAMILIES))

    def endpoint_changes(self, count: int) -> None:
        """Count events about EndpointSlices, each of which is of one family."""
        if count:
            self._slice_events.inc(count)

    def pending(self, services: int, slices: int) -> None:
        """Set the number of changed Services and EndpointSlices that wait for a sync."""
        self._pending = services, slices

    def queued(self) -> None:
        """Note a requested sync. The agent also calls this when it starts."""
        self._queued_at = self._clock()

    def synced(self, seconds: float, *, full: bool) -> None:
        """Note a sync that succeeded after ``seconds``; no change is pending now."""
        self._observe_sync(seconds, full=full)
        self._synced_at = self._clock()
        self._pending = 0, 0

    def failed(self, seconds: float, *, full: bool) -> None:
        """Note a sync that failed after ``seconds``; its changes are still pending."""
        self._observe_sync(seconds, full=full)

    def programmed(self, family: Family, latencies: Iterable[float]) -> None:
        """Observe the seconds from each change's trigger to its programming.

        See kube-proxy.md 16.4.
        """
        histogram = self._programming[family]
        for latency in latencies:
            histogram.observe(latency)

    def no_local_endpoints(self, counts: Mapping[TrafficPolicy, Mapping[Family, int]]) -> None:
        """Set the numbers of service ports without an endpoint here although a policy is Local."""
        for policy, families in counts.items():
            self._no_local[policy] |= families

    def stale_flows_ended(self, family: Family, seconds: float, entries: int) -> None:
        """Observe a search for stale UDP flows, its seconds and the number of ended flows."""
        self._stale_flow_searches.labels(family).observe(seconds)
        self._stale_flows_ended.labels(family).inc(entries)

    def answered(self, path: str, code: int) -> None:
        """Count a response of port 10256."""
        responses = {"/healthz": self._healthz, "/livez": self._livez}
        responses[path].labels(code).inc()

    def _declare_syncs(self) -> None:
        sync = "sync_{}proxy_rules_duration_seconds"
        self._syncs, self._full_syncs, self._partial_syncs = (
            _of_families(
                self._histogram(sync.format(kind), f"Duration of each {text}", SYNC_SECONDS)
            )
            for kind, text in (
                ("", "sync, full or partial"),
                ("full_", "sync of all services"),
                ("partial_", "sync of only the services that changed"),
            )
        )
        self._synced_at = self._queued_at = 0.0  # seconds since the epoch
        self._gauge(
            "sync_proxy_rules_last_timestamp_seconds",
            "Time of the last sync that succeeded",
            lambda: self._synced_at,
        )
        self._gauge(
            "sync_proxy_rules_last_queued_timestamp_seconds",
            "Time at which a sync was last requested",
            lambda: self._queued_at,
        )
        programming = self._histogram(
            "network_programming_duration_seconds",
            "From the change of a pod or Service to the sync that covers it",
            PROGRAMMING_SECONDS,
        )
        self._programming = {family: programming.labels(family) for family in Family}

    def _declare_changes(self) -> None:
        def pair(
            what: str, pending: Callable[[], int], pending_text: str, total_text: str
        ) -> Counter:
            name = f"kubeproxy_sync_proxy_rules_{what}_changes"
            Gauge(f"{name}_pending", pending_text, registry=self._registry).set_function(pending)
            return Counter(f"{name}_total", total_text, registry=self._registry)

        self._pending = 0, 0  # Services and EndpointSlices
        self._slice_events = pair(
            "endpoint",
            lambda: self._pending[1],
            "Changes of EndpointSlices that are not synced yet",
            "Events about EndpointSlices",
        )
        self._service_events = pair(
            "service",
            lambda: self._pending[0],
            "Changes of Services that are not synced yet",
            "Events about Services, each counted once for each family",
        )
        no_local = Gauge(
            "kubeproxy_sync_proxy_rules_no_local_endpoints_total",
            "Service ports that have no endpoint on this node although their policy is Local",
            ["traffic_policy", "ip_family"],
            registry=self._registry,
        )
        self._no_local = {policy: dict.fromkeys(Family, 0) for policy in TrafficPolicy}
        for policy, family in product(TrafficPolicy, Family):
            read = partial(self._without_local, policy, family)
            no_local.labels(policy, family).set_function(read)

    def _without_local(self, policy: TrafficPolicy, family: Family) -> int:
        return self._no_local[policy][family]

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        made = Histogram(
            f"kubeproxy_{name}",
            text,
            ["ip_family"],
            buckets=tuple(buckets),
            registry=self._registry,
        )
        return _with_series(made)

    def _gauge(self, name: str, text: str, value: Callable[[], float]) -> None:
        made = Gauge(f"kubeproxy_{name}", text, ["ip_family"], registry=self._registry)
        for family in _FAMILIES:
            made.labels(family).set_function(value)

    def _counter(self, name: str, text: str) -> Counter:
        return _with_series(
            Counter(f"kubeproxy_{name}", text, ["ip_family"], registry=self._registry)
        )

    def _response_counter(self, name: str, where: str) -> Counter:
        text = f"Responses of {where}"
        made = Counter(f"kubeproxy_proxy_{name}_total", text, ["code"], registry=self._registry)
        for code in CODES:
            made.labels(code)
        return made

    def _observe_sync(self, seconds: float, *, full: bool) -> None:
        for each in (*self._syncs, *(self._full_syncs if full else self._partial_syncs)):
            each.observe(seconds)


_Made = TypeVar("_Made", Histogram, Counter)


def _with_series(made: _Made) -> _Made:
    """Create the series of both families."""
    for family in _FAMILIES:
        made.labels(family)
    return made


def _of_families(made: Histogram) -> list[Histogram]:
    """Return the series of both families, to save a look-up for each observation."""
    return [made.labels(family) for family in _FAMILIES]
