# SPDX-License-Identifier: Apache-2.0
"""Health-check node ports: has this node any endpoint of a Service? (kube-proxy.md 10)

One server for each Service and family, so that each tells its own count; all of them in the one
thread of ``http.Loop``. The node's eligibility does not matter here.
"""

import json
import logging
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import NamedTuple

from ebpflb.cluster.recorder import Recorder, service
from ebpflb.model.addresses import Address, Family
from ebpflb.model.events import Key
from ebpflb.model.health import Checked
from ebpflb.serve.doors import Door, Loop, Room
from ebpflb.serve.http import JSON, Answer, Request
from ebpflb.serve.ports import listening_alone

log = logging.getLogger(__name__)

MOST = 128  # connections at a time
ANYWHERE = {Family.IPV4: "0.0.0.0", Family.IPV6: "::"}


class Server(NamedTuple):
    """Which Service and family."""

    key: Key
    family: Family


class Open(NamedTuple):
    """A port that is listened on, and by what."""

    port: int
    doors: list[Door]


class ServiceHealth:
    """All these ports of the node; ``healthy`` says whether the agent keeps up."""

    def __init__(
        self,
        loop: Loop,
        healthy: Callable[[], bool],
        recorder: Recorder,
        node_name: str,
        families: Collection[Family] = tuple(Family),
    ) -> None:
        self._loop, self._healthy = loop, healthy
        self._recorder, self._node_name = recorder, node_name
        self._room = Room(MOST)
        self._hosts = {family: [ANYWHERE[family]] for family in families}
        self._wanted: dict[Key, Checked] = {}
        self._counts: dict[Server, int] = {}
        self._open: dict[Server, Open] = {}
        self._failed: dict[Server, str] = {}

    def listen_at(self, addresses: Mapping[Family, Collection[Address]]) -> None:
        """On these addresses and no others, in the families named; said once, before ``update``."""
        chosen = {f: sorted(map(str, addresses[f])) for f in addresses.keys() & self._hosts.keys()}
        self._hosts |= chosen

    def update(self, wanted: Mapping[Key, Checked]) -> None:
        """Every such Service that there is; in force when this returns.

        A port that cannot be had is told as an event, and tried again at the next update.
        """
        if wanted != self._wanted or self._failed:
            self._wanted = dict(wanted)
            self._loop.do(self._update())

    def close(self) -> None:
        """Stops listening anywhere."""
        self.update({})

    async def _update(self) -> None:
        servers = {
            Server(key, family): (checked.port, count)
            for key, checked in self._wanted.items()
            for family, count in checked.counts.items()
            if family in self._hosts
        }
        self._counts = {server: count for server, (_, count) in servers.items()}
        for server, held in list(self._open.items()):
            if server not in servers or servers[server][0] != held.port:
                await self._close(server)
        for server in sorted(servers.keys() - self._open.keys()):
            await self._listen(server, servers[server][0])
        self._failed = {s: reason for s, reason in self._failed.items() if s in servers}

    async def _close(self, server: Server) -> None:
        for door in self._open.pop(server).doors:
            await door.close()

    async def _listen(self, server: Server, port: int) -> None:
        """On every address, or on none."""
        self._open[server] = Open(port, [])
        try:
            for host in self._hosts[server.family]:
                found = listening_alone(host, port, server.family)
                door = Door(partial(self._respond, server), self._room)
                self._open[server].doors.append(door)
                await door.open(found)
        except OSError as error:
            await self._close(server)
            self._complain(server, port, error.strerror or str(error))
        else:
            self._failed.pop(server, None)

    def _complain(self, server: Server, port: int, reason: str) -> None:
        note = (
            f"node {self._node_name} failed to start healthcheck"
            f' "{server.key}" on port {port} ({server.family}): {reason}'
        )
        about = service(server.key)
        self._recorder.event(about, "Warning", "FailedToStartServiceHealthcheck", "Listen", note)
        if self._failed.get(server) != note:
            log.error("%s; trying again at the next change", note)
        self._failed[server] = note

    def _respond(self, server: Server, _: Request) -> Answer:
        count, healthy = self._counts.get(server, 0), self._healthy()
        body = {
            "service": {"namespace": server.key.namespace, "name": server.key.name},
            "localEndpoints": count,
            "serviceProxyHealthy": healthy,
        }
        headers = {"X-Load-Balancing-Endpoint-Weight": str(count)}
        code = 200 if count and healthy else 503
        return Answer(code, json.dumps(body, indent="\t").encode(), JSON, headers)
