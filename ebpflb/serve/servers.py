# SPDX-License-Identifier: Apache-2.0
"""The HTTP servers of the running agent (kube-proxy.md 13 and 10).

Port 10256 is for load balancers and probes, 10249 for metrics and debugging, and each Service with
a health-check node port has a port. 10247 answers like 10256: a kube-proxy on the same node also
listens on 10256, but never on 10247. Commands on this node ask at a local socket.
"""

import asyncio
import json
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
from typing import NamedTuple

import msgspec

from ebpflb import stopping, unix_socket
from ebpflb.cluster import event_recorder
from ebpflb.cluster.event_recorder import EventRecorder, Reference, object_limit, service
from ebpflb.errors import NodeError, in_words
from ebpflb.model.addresses import Address, Family
from ebpflb.model.cluster_state import ObjectWarning
from ebpflb.model.endpoints import HealthCheck
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
    level_of,
    listen_in_family,
    run_beside,
)
from ebpflb.serve.metrics import Exposition, Metrics
from ebpflb.version import VERSION

log = logging.getLogger(__name__)

# Health-check node ports: whether this node has an endpoint of the Service (kube-proxy.md 10).
#
# There is one server for each Service and family, each with its own count; all of them run in one
# ServerThread. The node's eligibility does not matter here. A port that is in use is tried again
# until it is free, as beside a kube-proxy, which has all of them until it is gone.

_MAX_CONNECTIONS = 128
ANYWHERE = {Family.IPV4: ("0.0.0.0",), Family.IPV6: ("::",)}


class ServerKey(NamedTuple):
    """The identity of a server: there is one for each Service and family."""

    key: Key
    family: Family


class Addresses(NamedTuple):
    """The addresses of a server."""

    port: int
    hosts: tuple[str, ...]


class OpenServer(NamedTuple):
    """A server that listens."""

    addresses: Addresses
    listeners: list[Listener]


class ServiceHealth:
    """All health-check node ports. ``healthy`` returns whether the agent syncs in time."""

    def __init__(
        self,
        thread: ServerThread,
        healthy: Callable[[], bool],
        recorder: EventRecorder,
        node_name: str,
        families: Collection[Family] = tuple(Family),
        retry: float = LISTEN_RETRY_SECONDS,
    ) -> None:
        self._thread, self._healthy = thread, healthy
        self._recorder, self._node_name = recorder, node_name
        self._families, self._retry = families, retry
        self._connections = Connections(_MAX_CONNECTIONS)
        self._wanted: dict[Key, HealthCheck] = {}
        self._addresses: dict[Family, Collection[Address]] = {}
        self._open: dict[ServerKey, OpenServer] = {}
        self._failed: dict[ServerKey, str] = {}  # the last note about each
        self._may_report = object_limit().allows
        self._syncing = asyncio.Lock()
        self._retrying: asyncio.Task[None] | None = None

    def update(
        self,
        wanted: Mapping[Key, HealthCheck],
        addresses: Mapping[Family, Collection[Address]] = {},
    ) -> None:
        """Take all Services that have such a port; they listen when this returns.

        In the families of ``addresses`` they listen only on these. A port that is not free is
        reported as an event, and tried again every ``retry`` seconds.
        """
        if wanted != self._wanted or addresses != self._addresses:
            self._wanted, self._addresses = dict(wanted), dict(addresses)
            self._thread.run(self._sync())

    def close(self) -> None:
        """Stop listening, and retrying."""
        self.update({})

    async def _sync(self) -> None:
        async with self._syncing:
            wanted = self._wanted_servers()
            for server, opened in list(self._open.items()):
                if wanted.get(server) != opened.addresses:
                    await self._close(server)
            for server in sorted(wanted.keys() - self._open.keys()):
                await self._listen(server, wanted[server])
            self._failed = {s: note for s, note in self._failed.items() if s in wanted}
        if self._failed and not self._retrying:
            self._retrying = run_beside(self._retry_failed())

    async def _retry_failed(self) -> None:
        while self._failed:
            await asyncio.sleep(self._retry)
            await self._sync()
        self._retrying = None

    def _wanted_servers(self) -> dict[ServerKey, Addresses]:
        configured = {f: tuple(sorted(map(str, each))) for f, each in self._addresses.items()}
        hosts = {family: configured.get(family, ANYWHERE[family]) for family in self._families}
        return {
            ServerKey(key, family): Addresses(checked.port, hosts[family])
            for key, checked in self._wanted.items()
            for family in checked.local_endpoints.keys() & hosts.keys()
        }

    async def _close(self, server: ServerKey) -> None:
        for listener in self._open.pop(server).listeners:
            await listener.close()

    async def _listen(self, server: ServerKey, addresses: Addresses) -> None:
        """Listen on every address, or on none."""
        self._open[server] = OpenServer(addresses, [])
        try:
            for host in addresses.hosts:
                listening = listen_in_family(host, addresses.port, server.family)
                listener = Listener(partial(self._respond, server), self._connections)
                self._open[server].listeners.append(listener)
                await listener.open(listening)
        except OSError as error:
            await self._close(server)
            self._report_failure(server, addresses.port, error)
        else:
            self._failed.pop(server, None)

    def _report_failure(self, server: ServerKey, port: int, error: OSError) -> None:
        """Report a failure by event and log line, once for each reason, which names the address.

        They are limited for each Service: a tenant may change its port all the time.
        """
        note = (
            f"node {self._node_name} failed to start healthcheck"
            f' "{server.key}" on port {port}: {in_words(error)}'
        )
        is_known = self._failed.get(server) == note
        self._failed[server] = note
        if not is_known and self._may_report(server.key):
            about, event = service(server.key), "FailedToStartServiceHealthcheck"
            self._recorder.event(about, "Warning", event, "Listen", note)
            log.log(level_of(error), "%s; trying again every %g s", note, self._retry)

    def _respond(self, server: ServerKey, _: Request) -> Response:
        checked, healthy = self._wanted.get(server.key), self._healthy()
        count = checked.local_endpoints.get(server.family, 0) if checked else 0
        body = {
            "service": {"namespace": server.key.namespace, "name": server.key.name},
            "localEndpoints": count,
            "serviceProxyHealthy": healthy,
        }
        headers = {"X-Load-Balancing-Endpoint-Weight": str(count)}
        code = 200 if count and healthy else 503
        return Response(code, json.dumps(body, indent="\t").encode(), JSON, headers)


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
