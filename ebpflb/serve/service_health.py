# SPDX-License-Identifier: Apache-2.0
"""Health-check node ports: whether this node has an endpoint of the Service (kube-proxy.md 10).

There is one server for each Service and family, each with its own count; all of them run in one
ServerThread. The node's eligibility does not matter here. A port that is in use is tried again
until it is free, as beside a kube-proxy, which has all of them until it is gone.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import NamedTuple

from ebpflb.cluster.event_recorder import EventRecorder, object_limit, service
from ebpflb.errors import in_words
from ebpflb.model.addresses import Address, Family
from ebpflb.model.endpoints import HealthCheck
from ebpflb.model.events import Key
from ebpflb.serve.listener import (
    JSON,
    LISTEN_RETRY_SECONDS,
    Connections,
    Listener,
    Request,
    Response,
    ServerThread,
    level_of,
    listen_in_family,
    run_beside,
)

log = logging.getLogger(__name__)

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
