# SPDX-License-Identifier: Apache-2.0
"""Health-check node ports: has this node any endpoint of a Service? (kube-proxy.md 10)

One server for each Service and family, each with its own count; all of them in one ServerThread.
The node's eligibility does not matter here. A port that is in use is tried again until it is free:
beside a kube-proxy, which has them all, until that is gone.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import NamedTuple

from ebpflb.cluster.recorder import Recorder, service
from ebpflb.model.addresses import Address, Family
from ebpflb.model.events import Key
from ebpflb.model.health_check import HealthCheck
from ebpflb.serve.http import JSON, Request, Response
from ebpflb.serve.listener import Connections, Listener, ServerThread
from ebpflb.serve.ports import LISTEN_RETRY_SECONDS, listening_alone

log = logging.getLogger(__name__)

MAX_CONNECTIONS = 128
ANYWHERE = {Family.IPV4: ("0.0.0.0",), Family.IPV6: ("::",)}


class Server(NamedTuple):
    """Which Service and family."""

    key: Key
    family: Family


class Place(NamedTuple):
    """Where one listens."""

    port: int
    hosts: tuple[str, ...]


class Open(NamedTuple):
    """Where one does, and by what."""

    place: Place
    listeners: list[Listener]


class ServiceHealth:
    """All these ports of the node; ``healthy`` says whether the agent keeps up."""

    def __init__(
        self,
        thread: ServerThread,
        healthy: Callable[[], bool],
        recorder: Recorder,
        node_name: str,
        families: Collection[Family] = tuple(Family),
        retry: float = LISTEN_RETRY_SECONDS,
    ) -> None:
        self._thread, self._healthy = thread, healthy
        self._recorder, self._node_name = recorder, node_name
        self._families, self._retry = families, retry
        self._connections = Connections(MAX_CONNECTIONS)
        self._wanted: dict[Key, HealthCheck] = {}
        self._addresses: dict[Family, Collection[Address]] = {}
        self._open: dict[Server, Open] = {}
        self._failed: dict[Server, str] = {}
        self._settling = asyncio.Lock()
        self._trying: asyncio.Task[None] | None = None

    def update(
        self,
        wanted: Mapping[Key, HealthCheck],
        addresses: Mapping[Family, Collection[Address]] = {},
    ) -> None:
        """Every such Service that there is; in force when this returns.

        In the families named they listen on these addresses and no others. A port that cannot be
        had is told as an event, and tried again every ``retry`` seconds.
        """
        if wanted != self._wanted or addresses != self._addresses:
            self._wanted, self._addresses = dict(wanted), dict(addresses)
            self._thread.run(self._settle())

    def close(self) -> None:
        """Stops listening anywhere, and trying to."""
        self.update({})

    async def _settle(self) -> None:
        async with self._settling:
            places = self._places()
            for server, held in list(self._open.items()):
                if places.get(server) != held.place:
                    await self._close(server)
            for server in sorted(places.keys() - self._open.keys()):
                await self._listen(server, places[server])
            self._failed = {s: reason for s, reason in self._failed.items() if s in places}
        if self._failed and not self._trying:
            self._trying = asyncio.create_task(self._keep_trying())

    async def _keep_trying(self) -> None:
        while self._failed:
            await asyncio.sleep(self._retry)
            await self._settle()
        self._trying = None

    def _places(self) -> dict[Server, Place]:
        chosen = {f: tuple(sorted(map(str, found))) for f, found in self._addresses.items()}
        hosts = {family: chosen.get(family, ANYWHERE[family]) for family in self._families}
        return {
            Server(key, family): Place(checked.port, hosts[family])
            for key, checked in self._wanted.items()
            for family in checked.local_endpoints.keys() & hosts.keys()
        }

    async def _close(self, server: Server) -> None:
        for listener in self._open.pop(server).listeners:
            await listener.close()

    async def _listen(self, server: Server, place: Place) -> None:
        """On every address, or on none."""
        self._open[server] = Open(place, [])
        try:
            for host in place.hosts:
                found = listening_alone(host, place.port, server.family)
                listener = Listener(partial(self._respond, server), self._connections)
                self._open[server].listeners.append(listener)
                await listener.open(found)
        except OSError as error:
            await self._close(server)
            self._complain(server, place.port, error.strerror or str(error))
        else:
            self._failed.pop(server, None)

    def _complain(self, server: Server, port: int, reason: str) -> None:
        """Once for each reason, which names the address."""
        note = (
            f"node {self._node_name} failed to start healthcheck"
            f' "{server.key}" on port {port}: {reason}'
        )
        if self._failed.get(server) != note:
            self._failed[server] = note
            about, event = service(server.key), "FailedToStartServiceHealthcheck"
            self._recorder.event(about, "Warning", event, "Listen", note)
            log.error("%s; trying again every %g s", note, self._retry)

    def _respond(self, server: Server, _: Request) -> Response:
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
