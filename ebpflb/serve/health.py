# SPDX-License-Identifier: Apache-2.0
"""Port 10256: whether the agent syncs in time, and the node should get traffic.

See kube-proxy.md 13.1. An agent is unhealthy if a change has not been applied for longer than the
timeout, or its loop has not run for a minute. /livez reports only this, for the kubelet that
restarts the agent. /healthz is for load balancers: it is also unhealthy while the node is about to
be deleted, or the audit knows that the data plane is not in force. One agent serves both families:
their status is the same.

/readyz is ebpflb's own: 200 once this agent's programs and every service are in force, and its loop
runs. Its header Server shows that the answer is not from a kube-proxy. The reasons are shown on
loopback only, because port 10256 is open to the network.
"""

import threading
import time
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

import msgspec
from msgspec import UNSET, UnsetType

from ebpflb.model import nodes
from ebpflb.model.addresses import Family
from ebpflb.model.nodes import DEAD_SECONDS, Pulse
from ebpflb.model.objects import Node
from ebpflb.serve.listener import JSON, NOT_FOUND, Request, Response

OnResponse = Callable[[str, int], None]
"""Called with the path and the status of each response."""

SERVER = "ebpflb"  # the header of /readyz
MAX_REASONS = 20
NOT_TOLD = "run `ebpflb status` on the node"  # instead of reasons, except on loopback
NEVER = "0001-01-01T00:00:00Z"  # Go's zero time


class _Proxier(msgspec.Struct, rename="camel"):
    last_updated: str
    healthy: bool


class _Body(msgspec.Struct, rename="camel", omit_defaults=True, kw_only=True):
    last_updated: str
    current_time: str
    node_eligible: bool | UnsetType
    healthy: bool
    status: dict[str, _Proxier] = {}


class _Readiness(msgspec.Struct):
    ready: bool
    reasons: list[str]


class Health:
    """Written by the agent's thread, read by the servers' thread.

    ``timeout`` is in seconds. ``now`` returns nanoseconds since the epoch, ``monotonic`` seconds of
    a clock that is never set.
    """

    def __init__(
        self,
        timeout: float,
        families: Iterable[Family] = tuple(Family),
        *,
        now: Callable[[], int] = time.time_ns,
        monotonic: Callable[[], float] = time.monotonic,
        on_response: OnResponse = lambda path, code: None,
        waiting: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``waiting``: how long the oldest message has waited for the agent's loop, in seconds."""
        self.timeout, self.waiting = timeout, waiting
        self._last_turn: float | None = None  # None: the agent is starting, which may take long
        self._families = sorted(families)
        self._now, self._monotonic, self._on_response = now, monotonic, on_response
        self._lock = threading.Lock()
        self._synced: int | None = None
        self._waiting_since: float | None = None
        self._node: Node | None = None
        self._in_force = True
        self._not_ready = ["the agent is starting"]

    def set_in_force(self, in_force: bool) -> None:
        """Set whether programs and maps match the plan, as far as is known."""
        self._in_force = in_force

    def set_not_ready(self, reasons: list[str]) -> None:
        """Set why not everything is in force (serve/conditions.py); empty if everything is."""
        self._not_ready = reasons

    def turned(self) -> None:
        """Note a turn of the loop; called from the first time on that everything is in force."""
        self._last_turn = self._monotonic()

    @property
    def pulse(self) -> Pulse:
        """The current state of the loop."""
        last = self._last_turn
        return Pulse(0.0 if last is None else self._monotonic() - last, self.waiting())

    def queued(self) -> None:
        """Note that a change waits to be applied; the time counts from the oldest one."""
        with self._lock:
            if self._waiting_since is None:
                self._waiting_since = self._monotonic()

    def synced(self) -> None:
        """Note that everything is applied. The agent also calls this when it begins to serve."""
        with self._lock:
            self._waiting_since = None
            self._synced = self._now()

    def set_node(self, node: Node | None) -> None:
        """Set the Node; None, for a deleted one, keeps the last.

        A new zone is a change to apply.
        """
        if node is None or node is self._node:
            return
        last, self._node = self._node, node
        if nodes.zone(node) != (nodes.zone(last) if last else ""):
            self.queued()

    @property
    def healthy(self) -> bool:
        with self._lock:
            since = self._waiting_since
        is_late = since is not None and self._monotonic() - since >= self.timeout
        return not is_late and self.pulse.silent < DEAD_SECONDS

    @property
    def serves(self) -> bool:
        """Whether the agent is healthy, and the data plane is in force as far as is known."""
        return self.healthy and self._in_force

    @property
    def ready(self) -> bool:
        """Whether /readyz answers 200."""
        return not self._reasons

    @property
    def node(self) -> Node | None:
        """This node's Node as it was received last; None before."""
        return self._node

    @property
    def eligible(self) -> bool:
        """Whether the node should get traffic; False before its Node is known."""
        node = self._node
        return node is not None and nodes.eligible(node)

    def respond(self, request: Request) -> Response:
        """Return the response of port 10256."""
        if request.path == "/readyz":
            return self._readiness(tell=request.on_loopback)
        if request.path not in ("/healthz", "/livez"):
            return NOT_FOUND
        is_healthz = request.path == "/healthz"
        eligible = self.eligible if is_healthz else UNSET
        response = self._response(self.serves if is_healthz else self.healthy, eligible)
        self._on_response(request.path, response.status)
        return response

    @property
    def _reasons(self) -> list[str]:
        """Why the node is not ready.

        A backlog does not count, since a flood hits all nodes at once.
        """
        return [*self.pulse.stalled, *self._not_ready]

    def _readiness(self, *, tell: bool) -> Response:
        """Respond to /readyz.

        With ``tell`` the answer has the reasons, which name Services, devices and files.
        """
        reasons = self._reasons
        told = reasons[:MAX_REASONS] if tell or not reasons else [NOT_TOLD]
        body = msgspec.json.encode(_Readiness(not reasons, told))
        return Response(503 if reasons else 200, body, JSON, {"Server": SERVER})

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
    """Format a time like Go's time.RFC3339Nano: without trailing zeros."""
    seconds, rest = divmod(nanoseconds, 10**9)
    whole = f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%dT%H:%M:%S}"
    return f"{whole}.{rest:09}".rstrip("0").rstrip(".") + "Z"
