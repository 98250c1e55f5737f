# SPDX-License-Identifier: Apache-2.0
"""Whether the agent keeps up, and whether the node is to get traffic (kube-proxy.md 13.1).

Unhealthy is an agent that has left a change unapplied for longer than the timeout; nothing to do
is healthy. /livez tells this alone, to whoever restarts the agent; /healthz also tells load
balancers of a node that is about to go. One agent serves both families, so both tell the same.
"""

import threading
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

import msgspec
from msgspec import UNSET, UnsetType

from ebpflb.model import nodes
from ebpflb.model.addresses import Family
from ebpflb.model.objects import Node
from ebpflb.serve.http import JSON, NOT_FOUND, Request, Response

OnResponse = Callable[[str, int], None]
"""Told of the path and the status of each answer."""

NEVER = "0001-01-01T00:00:00Z"  # kube-proxy's way to say it


class _Proxier(msgspec.Struct, rename="camel"):
    last_updated: str
    healthy: bool


class _Body(msgspec.Struct, rename="camel", omit_defaults=True, kw_only=True):
    last_updated: str
    current_time: str
    node_eligible: bool | UnsetType
    healthy: bool
    status: dict[str, _Proxier] = {}


class Health:
    """Told by the agent's thread, asked by others.

    ``timeout`` is in seconds, twice the sync period; ``now`` is nanoseconds since the epoch, and
    ``ticks`` are the seconds of a clock that nobody sets.
    """

    def __init__(
        self,
        timeout: float,
        families: Iterable[Family] = tuple(Family),
        *,
        now: Callable[[], int] = time.time_ns,
        ticks: Callable[[], float] = time.monotonic,
        on_response: OnResponse = lambda path, code: None,
    ) -> None:
        self._timeout = timeout
        self._families = sorted(families)
        self._now, self._ticks, self._on_response = now, ticks, on_response
        self._lock = threading.Lock()
        self._synced: int | None = None
        self._waiting_since: float | None = None
        self._node: Node | None = None

    def queued(self) -> None:
        """There is a change to be applied; the clock runs from the oldest such one."""
        with self._lock:
            if self._waiting_since is None:
                self._waiting_since = self._ticks()

    def synced(self) -> None:
        """Everything is applied; to be called also when the agent begins to serve."""
        with self._lock:
            self._waiting_since = None
            self._synced = self._now()

    def set_node(self, node: Node | None) -> None:
        """None, for one that is gone, leaves the last one known. A new zone is a change."""
        if node is None or node is self._node:
            return
        known, self._node = self._node, node
        if nodes.zone(node) != (nodes.zone(known) if known else ""):
            self.queued()

    @property
    def healthy(self) -> bool:
        with self._lock:
            since = self._waiting_since
        return since is None or self._ticks() - since < self._timeout

    @property
    def eligible(self) -> bool:
        """Not before the Node is known."""
        node = self._node
        return node is not None and nodes.eligible(node)

    def respond(self, request: Request) -> Response:
        """What 10256 says."""
        if request.path not in ("/healthz", "/livez"):
            return NOT_FOUND
        eligible = self.eligible if request.path == "/healthz" else UNSET
        response = self._response(self.healthy, eligible)
        self._on_response(request.path, response.status)
        return response

    def _response(self, healthy: bool, eligible: bool | UnsetType) -> Response:
        good = healthy and eligible is not False
        now, synced = self._now(), self._synced
        last = NEVER if synced is None else rfc3339(synced)
        proxiers = (
            {} if synced is None else {str(f): _Proxier(last, healthy) for f in self._families}
        )
        body = _Body(
            last_updated=rfc3339(now) if good else last,
            current_time=rfc3339(now),
            node_eligible=eligible,
            healthy=healthy,
            status=proxiers,
        )
        return Response(200 if good else 503, msgspec.json.encode(body), JSON)


def rfc3339(nanoseconds: int) -> str:
    """As Go writes time.RFC3339Nano: no zeros at the end."""
    seconds, rest = divmod(nanoseconds, 10**9)
    whole = f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}"
    return f"{whole}.{rest:09}".rstrip("0").rstrip(".") + "Z"
