# SPDX-License-Identifier: Apache-2.0
"""The metrics that dashboards for kube-proxy know: kube-proxy.md 14, to the name and the bucket.

One agent serves both families, and one sync writes both: it is observed once for each, as a
dual-stack kube-proxy does. Every series is there from the start, at zero.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from ebpflb.model.addresses import Family
from ebpflb.model.no_local_endpoints import TrafficPolicy

SYNC_SECONDS = tuple(0.001 * 2**power for power in range(15))
PROGRAMMING_SECONDS = (0.25, 0.5, *range(1, 60), *range(60, 120, 5), *range(120, 301, 30))
CODES = (200, 503)

_FAMILIES = tuple(map(str, Family))


class KubeProxy:
    """What an agent tells of its syncs and answers; safe to call from any thread."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.time) -> None:
        """``clock`` gives seconds since the epoch."""
        self._registry, self._clock = registry, clock
        self._declare_syncs()
        self._declare_changes()
        self._healthz = self._answers("healthz", "/healthz of port 10256")
        self._livez = self._answers("livez", "/livez of port 10256")
        self._cures = self._histogram(
            "conntrack_reconciler_sync_duration_seconds",
            "Duration of each ending of stale UDP flows",
            SYNC_SECONDS,
        )
        self._cured = self._counter(
            "conntrack_reconciler_deleted_entries_total",
            "Stale UDP flows ended: entries of the packet path and sockets",
        )

    def service_changes(self, count: int) -> None:
        """So many events about Services."""
        self._services_seen.inc(count * len(_FAMILIES))

    def endpoint_changes(self, count: int) -> None:
        """The same for EndpointSlices of IPv4 and IPv6 addresses: each is of one family."""
        self._slices_seen.inc(count)

    def pending(self, services: int, slices: int) -> None:
        """So many wait for a sync now."""
        self._services_pending.set(services)
        self._slices_pending.set(slices)

    def queued(self) -> None:
        """A sync is wanted; also to be said when the agent begins."""
        self._stamp(self._last_queued)

    def synced(self, seconds: float, *, full: bool) -> None:
        """A sync took so long and succeeded: nothing waits any more."""
        self._took(seconds, full=full)
        self._stamp(self._last_synced)
        self.pending(0, 0)

    def failed(self, seconds: float, *, full: bool) -> None:
        """A sync took so long and failed: what waited for it waits on."""
        self._took(seconds, full=full)

    def programmed(self, family: Family, latencies: Iterable[float]) -> None:
        """Seconds from the trigger of each change to its programming (kube-proxy.md 16.4)."""
        histogram = self._programming.labels(family)
        for latency in latencies:
            histogram.observe(latency)

    def no_local_endpoints(self, counts: Mapping[TrafficPolicy, Mapping[Family, int]]) -> None:
        """Service ports that a policy Local leaves without an endpoint here, as they stand now."""
        for policy, families in counts.items():
            for family, count in families.items():
                self._no_local.labels(policy, family).set(count)

    def cured(self, family: Family, seconds: float, entries: int) -> None:
        """Stale UDP flows were looked for, and so many were ended."""
        self._cures.labels(family).observe(seconds)
        self._cured.labels(family).inc(entries)

    def answered(self, path: str, code: int) -> None:
        """Port 10256 has answered so."""
        answers = {"/healthz": self._healthz, "/livez": self._livez}
        answers[path].labels(code).inc()

    def _declare_syncs(self) -> None:
        sync = "sync_{}proxy_rules_duration_seconds"
        self._syncs, self._full_syncs, self._partial_syncs = (
            self._histogram(sync.format(kind), f"Duration of each {said}", SYNC_SECONDS)
            for kind, said in (
                ("", "sync, full or partial"),
                ("full_", "sync of all services"),
                ("partial_", "sync of those services that changed"),
            )
        )
        self._last_synced = self._gauge(
            "sync_proxy_rules_last_timestamp_seconds", "Time of the last sync that succeeded"
        )
        self._last_queued = self._gauge(
            "sync_proxy_rules_last_queued_timestamp_seconds", "Time a sync was last requested"
        )
        self._programming = self._histogram(
            "network_programming_duration_seconds",
            "From the change of a pod or Service to the sync that covers it",
            PROGRAMMING_SECONDS,
        )

    def _declare_changes(self) -> None:
        def pair(what: str, waiting: str, seen: str) -> tuple[Gauge, Counter]:
            name = f"kubeproxy_sync_proxy_rules_{what}_changes"
            pending = Gauge(f"{name}_pending", waiting, registry=self._registry)
            return pending, Counter(f"{name}_total", seen, registry=self._registry)

        self._slices_pending, self._slices_seen = pair(
            "endpoint",
            "Changes of EndpointSlices that are not synced yet",
            "Events about EndpointSlices",
        )
        self._services_pending, self._services_seen = pair(
            "service",
            "Changes of Services that are not synced yet",
            "Events about Services, each counted once for each family",
        )
        self._no_local = Gauge(
            "kubeproxy_sync_proxy_rules_no_local_endpoints_total",
            "Service ports that a policy Local leaves without an endpoint on this node",
            ["traffic_policy", "ip_family"],
            registry=self._registry,
        )
        self.no_local_endpoints({policy: dict.fromkeys(Family, 0) for policy in TrafficPolicy})

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        made = Histogram(
            f"kubeproxy_{name}",
            text,
            ["ip_family"],
            buckets=tuple(buckets),
            registry=self._registry,
        )
        return _begun(made)

    def _gauge(self, name: str, text: str) -> Gauge:
        return _begun(Gauge(f"kubeproxy_{name}", text, ["ip_family"], registry=self._registry))

    def _counter(self, name: str, text: str) -> Counter:
        return _begun(Counter(f"kubeproxy_{name}", text, ["ip_family"], registry=self._registry))

    def _answers(self, name: str, where: str) -> Counter:
        text = f"Answers of {where}"
        made = Counter(f"kubeproxy_proxy_{name}_total", text, ["code"], registry=self._registry)
        for code in CODES:
            made.labels(code)
        return made

    def _took(self, seconds: float, *, full: bool) -> None:
        for family in _FAMILIES:
            self._syncs.labels(family).observe(seconds)
            (self._full_syncs if full else self._partial_syncs).labels(family).observe(seconds)

    def _stamp(self, gauge: Gauge) -> None:
        now = self._clock()
        for family in _FAMILIES:
            gauge.labels(family).set(now)


_Made = TypeVar("_Made", Histogram, Gauge, Counter)


def _begun(made: _Made) -> _Made:
    for family in _FAMILIES:
        made.labels(family)
    return made
