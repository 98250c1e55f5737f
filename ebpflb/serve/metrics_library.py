# SPDX-License-Identifier: Apache-2.0
"""The metrics that kube-proxy has from its libraries: build, process, feature gates, requests to
the API server, and the health checks of /metrics/slis.

Names, labels and buckets are those of Kubernetes' component-base 1.36.
"""

import platform
from urllib.parse import urlsplit

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)

from ebpflb.version import BUILD_DATE, COMMIT, VERSION

REQUEST_SECONDS = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)
NO_RESPONSE = "<error>"  # client-go's code for a request without a response

_EMPTY_LABELS = ("git_tree_state", "go_version", "compiler")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64"}


def describe_process(registry: CollectorRegistry) -> None:
    """process_*, python_gc_* and python_info."""
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    PlatformCollector(registry=registry)


def describe_build(registry: CollectorRegistry) -> None:
    """kubernetes_build_info. The labels that only a Go program has are empty."""
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


class Requests:
    """rest_client_*: requests to the API server."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._count = Counter(
            "rest_client_requests_total",
            "Requests to the API server by status code, method and host",
            ["code", "method", "host"],
            registry=registry,
        )
        self._seconds = Histogram(
            "rest_client_request_duration_seconds",
            "Time until the API server responded, by verb and host",
            ["verb", "host"],
            buckets=REQUEST_SECONDS,
            registry=registry,
        )

    def observe(self, method: str, url: str, code: int | None, seconds: float) -> None:
        """One request. ``code`` is None without a response; a watch ends when its response begins.

        ``url`` is any URL of the server.
        """
        host = urlsplit(url).netloc
        self._count.labels(NO_RESPONSE if code is None else code, method, host).inc()
        self._seconds.labels(method, host).observe(seconds)


class FeatureGates:
    """kubernetes_feature_enabled, for the supported feature gates and no others."""

    def __init__(self, registry: CollectorRegistry) -> None:
        text = "Whether a supported feature gate is enabled, with its stage in Kubernetes"
        labels = ["name", "stage"]
        self._enabled = Gauge("kubernetes_feature_enabled", text, labels, registry=registry)

    def set(self, name: str, stage: str, *, enabled: bool) -> None:
        """One gate and its stage as Kubernetes 1.36 writes it, as in "DEPRECATED"."""
        self._enabled.labels(name, stage).set(enabled)


class SliMetrics:
    """kubernetes_healthcheck*, the metrics of /metrics/slis."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._last = Gauge(
            "kubernetes_healthcheck",
            "Result of the last health check: 1 is success",
            ["name", "type"],
            registry=registry,
        )
        self._all = Counter(
            "kubernetes_healthchecks_total",
            "Health checks by result",
            ["name", "type", "status"],
            registry=registry,
        )

    def observe(self, name: str, type: str, *, ok: bool) -> None:
        """One check of ``type`` healthz or livez."""
        self._last.labels(name, type).set(ok)
        self._all.labels(name, type, "success" if ok else "error").inc()
