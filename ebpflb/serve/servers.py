# SPDX-License-Identifier: Apache-2.0
"""The HTTP servers of the running agent (kube-proxy.md 13 and 10).

Port 10256 is for load balancers and probes, 10249 for metrics and debugging, and each Service with
a health-check node port has a port. 10247 answers like 10256: a kube-proxy on the same node also
listens on 10256, but never on 10247. Commands on this node ask at a local socket.
"""

import logging
import platform
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from ebpflb import stopping, unix_socket
from ebpflb.cluster import event_recorder
from ebpflb.cluster.event_recorder import EventRecorder, Reference
from ebpflb.errors import NodeError, in_words
from ebpflb.model.addresses import Family
from ebpflb.model.cluster_state import ObjectWarning
from ebpflb.model.events import Key
from ebpflb.options import Options
from ebpflb.serve.health import Health, OnResponse
from ebpflb.serve.listener import (
    JSON,
    LISTEN_RETRY_SECONDS,
    NOT_FOUND,
    TEXT,
    Connections,
    Handler,
    Listener,
    Port,
    Request,
    Response,
    ServerThread,
)
from ebpflb.serve.metrics import Exposition, Metrics
from ebpflb.serve.service_health import ServiceHealth
from ebpflb.version import VERSION

log = logging.getLogger(__name__)

# Port 10249: metrics, and pages for debugging (kube-proxy.md 13.2).
#
# /flagz and /statusz have kube-proxy's format. With --profiling, /debug/stacks shows the stack of
# every thread; kube-proxy's /debug/pprof profiles Go and has no counterpart.

MODE = "ebpf"  # kube-proxy's values are iptables, ipvs or nftables

_WARNING = (
    "Warning: This endpoint is not meant to be machine parseable,"
    " has no formatting compatibility guarantees and is for debugging purposes only."
)


@dataclass(frozen=True)
class MetricsPages:
    """``configuration``, serializable by msgspec, and ``flags`` are those in force.

    ``started`` is in epoch seconds.
    """

    metrics: Metrics
    configuration: object
    flags: Mapping[str, str]
    profiling: bool = False
    started: float = field(default_factory=time.time)

    def respond(self, request: Request) -> Response:
        """Return the response of port 10249."""
        page = self._pages().get(request.path)
        return page(request) if page else NOT_FOUND

    def _pages(self) -> dict[str, Handler]:
        pages: dict[str, Handler] = {
            "/metrics": lambda request: _metrics(self.metrics.exposition(request.accept)),
            "/metrics/slis": lambda request: _metrics(self.metrics.slis_exposition(request.accept)),
            "/healthz": lambda _: self._healthz(),
            "/proxyMode": lambda _: Response(200, MODE.encode()),
            "/configz": lambda _: self._configz(),
            "/flagz": lambda _: self._flagz(),
            "/statusz": lambda _: self._statusz(),
        }
        if self.profiling:
            pages["/debug/stacks"] = lambda _: Response(200, "\n".join(stacks()).encode(), TEXT)
        return pages

    def _healthz(self) -> Response:
        """Count the request, as kube-proxy does among the slis."""
        self.metrics.check("ping", "healthz", ok=True)
        return Response(200, b"ok")

    def _configz(self) -> Response:
        body = {"kubeproxy.config.k8s.io": self.configuration}
        return Response(200, msgspec.json.encode(body), JSON)

    def _flagz(self) -> Response:
        lines = [f"{name}={value}" for name, value in sorted(self.flags.items())]
        return _page("flags", ["", *lines])

    def _statusz(self) -> Response:
        up = int(time.time() - self.started)
        lines = [
            "",
            f"Started: {time.strftime('%a %b %e %H:%M:%S UTC %Y', time.gmtime(self.started))}",
            f"Up: {up // 3600} hr {up // 60 % 60:02} min {up % 60:02} sec",
            f"Python version: {platform.python_version()}",
            f"Binary version: {VERSION}",
            f"Paths: {' '.join(sorted(self._pages()))}",
        ]
        return _page("statusz", lines)


def _metrics(exposition: Exposition) -> Response:
    return Response(200, *exposition)


def _page(name: str, lines: list[str]) -> Response:
    text = ["", f"ebpflb {name}", _WARNING, *lines, ""]
    return Response(200, "\n".join(text).encode())


def stacks() -> list[str]:
    """Return the name and the stack of every thread."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return [
        f"{names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()  # noqa: SLF001
    ]


MAX_PROBE_CONNECTIONS, MAX_SCRAPE_CONNECTIONS = 128, 32
START_ACTION = "StartKubeProxy"  # of all events at the start

# HTTP over a socket in the run directory: the agent's answers to commands on this node.
#
# Only root may connect. Each request has a thread of its own, so neither the agent's loop nor other
# requests wait for it.

MAX_LOCAL_CONNECTIONS = 16
_LOCAL_SECONDS = 100.0  # doctor's audit takes up to 90


class LocalSocket:
    """The socket; if it cannot listen, the agent continues without it."""

    def __init__(self, path: Path, handler: Handler, timeout: float = _LOCAL_SECONDS) -> None:
        self._path = path
        connections = Connections(MAX_LOCAL_CONNECTIONS, timeout)
        self._listener = Listener(handler, connections, threads=MAX_LOCAL_CONNECTIONS)

    async def open(self) -> None:
        """Open the socket, replacing an earlier agent's."""
        try:
            await self._listener.open(unix_socket.listen(self._path))
        except OSError as error:
            log.warning("%s: %s: commands will read only the maps", self._path, in_words(error))

    async def close(self) -> None:
        """Close the socket.

        Raises OSError if its file cannot be removed, after everything else is done.
        """
        try:
            await self._listener.close()
        finally:
            self._path.unlink(missing_ok=True)


class HttpServers:
    """The agent updates ``health`` and ``service_health`` between ``start`` and ``stop``."""

    def __init__(
        self,
        options: Options,
        events: EventRecorder,
        pages: MetricsPages,
        on_response: OnResponse = lambda path, code: None,
        *,
        families: Collection[Family] = tuple(Family),
        retry: float = LISTEN_RETRY_SECONDS,
        local: Handler | None = None,
        waiting: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``retry`` is in seconds. The agent is unhealthy if it lags by twice the sync period.

        ``local`` answers paths below /v1 in the run directory, ``pages`` answer the others there;
        ``waiting``: as for ``Health``.
        """
        self._options, self.events, self._retry = options, events, retry
        self._node = event_recorder.node(options.node_name)
        self._thread = ServerThread()
        self.health = Health(
            2 * options.sync_period, families, on_response=on_response, waiting=waiting
        )
        self.service_health = ServiceHealth(
            self._thread, lambda: self.health.serves, events, options.node_name, families, retry
        )
        self._local: LocalSocket | None = None
        if local:
            handler = _beside(local, replace(pages, profiling=True))
            self._local = LocalSocket(options.paths.socket_file, handler)
        self._ports = self._all_ports(options, pages)

    def start(self) -> None:
        """Start all servers. Raises NodeError with address and reason if a required port fails.

        A failure is also written as an event, and stops everything again.
        """
        self.events.start()
        self._thread.start()
        self.health.synced()
        for reason, port in self._ports.items():
            try:
                self._thread.run(port.open())
            except NodeError as error:
                self._warn(self._node, reason, START_ACTION, str(error))
                self.stop()
                raise
        if self._local:
            self._thread.run(self._local.open())
        self.events.event(self._node, "Normal", "Starting", START_ACTION, "")

    def ports_not_open(self) -> dict[str, str]:
        """Return server -> its address, and why it cannot listen there; safe in any thread."""
        return {
            port.name: f"{port.address}: {error}"
            for port in self._ports.values()
            if (error := port.error)
        }

    def record_unknown_node(self, note: str) -> None:
        """Record an event about this node's name, which no Node has."""
        self._warn(self._node, "NodeUnknown", START_ACTION, note)

    def record_drift(self, note: str) -> None:
        """Record an event: the node differs from the plan."""
        self._warn(self._node, "DataPlaneDrift", "Audit", note)

    def record_lack(self, service: Key, reason: str) -> None:
        """Record an event: a Service does not fit into the maps."""
        self._warn(event_recorder.service(service), "DoesNotFit", "Program", reason)

    def record_no_address(self, service: Key, note: str) -> None:
        """Record an event: a Service has not the load balancer address that it asks for."""
        self._warn(event_recorder.service(service), "AllocationFailed", "Assign", note)

    def record_set_aside(self, service: Key, note: str) -> None:
        """Record an event: an endpoint gets no connections."""
        self._warn(event_recorder.service(service), "EndpointSetAside", "Watch", note)

    def record_annotation(self, warning: ObjectWarning) -> None:
        """Record an event: an object's annotation cannot be read."""
        about = Reference(warning.kind, warning.key)
        self._warn(about, "InvalidAnnotation", "Configure", warning.reason)

    def _warn(self, about: Reference, reason: str, action: str, note: str) -> None:
        """Record an event, which takes no time; it has already been logged."""
        self.events.event(about, "Warning", reason, action, note)

    def stop(self) -> None:
        """Close everything; does nothing if it was never started, or is already stopped."""
        steps: list[Callable[[], object]] = [self._thread.stop, self.events.stop]
        if self._thread.alive:
            opened: list[LocalSocket | Port] = [
                *([self._local] if self._local else []),
                *self._ports.values(),
            ]
            closed = [partial(self._close, each) for each in opened]
            steps = [self.service_health.close, *closed, *steps]
        stopping.run_all(*steps)

    def _close(self, opened: LocalSocket | Port) -> None:
        self._thread.run(opened.close())

    def _all_ports(self, options: Options, pages: MetricsPages) -> dict[str, Port]:
        """Return the ports by the reason of the event for a failure to open."""
        probes, own_probes = (
            Listener(self.health.respond, Connections(MAX_PROBE_CONNECTIONS)) for _ in range(2)
        )
        scrapes = Listener(pages.respond, Connections(MAX_SCRAPE_CONNECTIONS), threads=1)
        return {
            "FailedToStartProxierHealthcheck": self._port(
                "health server (--healthz-bind-address)", options.healthz_address, probes
            ),
            "FailedToStartReadinessServer": self._port(
                "readiness server (--readyz-bind-address)", options.readyz_address, own_probes
            ),
            "FailedToStartMetricServer": self._port(
                "metrics server (--metrics-bind-address)", options.metrics_address, scrapes
            ),
        }

    def _port(self, name: str, address: str, listener: Listener) -> Port:
        required = self._options.bind_address_hard_fail
        return Port(name, address, listener, required=required, retry=self._retry)


def _beside(local: Handler, pages: MetricsPages) -> Handler:
    return lambda request: (local if request.path.startswith("/v1/") else pages.respond)(request)
