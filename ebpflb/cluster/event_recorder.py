# SPDX-License-Identifier: Apache-2.0
"""Kubernetes events (events.k8s.io/v1) about the Node and its Services, like kube-proxy's.

Recording an event takes no time, however many are recorded: they are limited for each object and
for the node. A thread sends events to the API server, and tries again while the server cannot be
reached; if too many wait, the oldest are dropped.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple
from urllib.parse import quote

import msgspec

from ebpflb.cluster.decoding import RequestRejected
from ebpflb.cluster.source import Backoff, ServerOptions, Timing
from ebpflb.errors import EbpflbError, in_words, log_once
from ebpflb.model.events import Key, Kind
from ebpflb.redaction import redact
from ebpflb.stopping import parts

if TYPE_CHECKING:
    from ebpflb.cluster import api

# How often something may be reported, so that no tenant fills the log or the API server.

MOST_KEYS = 4096  # remembered, as in client-go; the least recently used one is forgotten


class RateLimit:
    """Allow ``burst`` reports at once for each key, and then one per ``seconds``."""

    def __init__(
        self, burst: int, seconds: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``clock`` is a monotonic clock, in seconds."""
        self._spare, self._seconds, self._clock = (burst - 1) * seconds, seconds, clock
        self._paid_until: dict[Hashable, float] = {}  # each report pays for ``seconds``

    def allows(self, key: Hashable) -> bool:
        """Whether one more report about ``key`` may be made now; if so, count it as made."""
        now = self._clock()
        paid_until = max(self._paid_until.pop(key, now), now)
        is_allowed = paid_until - now <= self._spare
        self._paid_until[key] = paid_until + self._seconds if is_allowed else paid_until
        if len(self._paid_until) > MOST_KEYS:
            del self._paid_until[next(iter(self._paid_until))]
        return is_allowed


def object_limit(clock: Callable[[], float] = time.monotonic) -> RateLimit:
    """Return client-go's limit for events of each object."""
    return RateLimit(25, 300.0, clock)


log = logging.getLogger(__name__)

CONTROLLER = "ebpflb"
QUEUE_SIZE = 100  # events that wait to be sent
ATTEMPTS = 12  # for one event; client-go's number
# For all objects except the Node: this many events at once, then one per NODE_SECONDS.
NODE_BURST, NODE_SECONDS = 100, 10.0
MAX_NOTE, MAX_INSTANCE = 1024, 128  # bytes; the API server refuses more

_VERSIONS: dict[str, str] = {Kind.ENDPOINT_SLICE: "discovery.k8s.io/v1"}

MakeServer = Callable[[], "api.Server"]  # connects to the API server
Severity = Literal["Normal", "Warning"]


class Reference(NamedTuple):
    """An object; its name is also used as uid, as in kube-proxy (and `kubectl describe node`)."""

    kind: str
    key: Key

    def __str__(self) -> str:
        return f"{self.kind} {self.key}"


class Event(NamedTuple):
    """An event about an object; ``action`` is what ebpflb was doing."""

    about: Reference
    severity: Severity
    reason: str
    action: str
    note: str


def node(name: str) -> Reference:
    return Reference("Node", Key("", name))


def service(key: Key) -> Reference:
    return Reference("Service", key)


class EventRecorder:
    """Send events to an API server; ``make_server`` is called when there is an event.

    Without it there are no events: their texts are in the log too. ``dropped``: how many were
    lost.
    """

    def __init__(
        self,
        make_server: MakeServer | None,
        node_name: str,
        *,
        timing: Timing | None = None,
        clock: Callable[[], float] = time.monotonic,
        stop_timeout: float = 2.0,
    ) -> None:
        """``stop_timeout``: seconds that ``stop`` waits for unsent events."""
        self._make_server = make_server
        self.instance = f"{CONTROLLER}-{node_name}"[:MAX_INSTANCE]
        self._timing, self._stop_timeout = timing or Timing(), stop_timeout
        self.dropped = 0
        self._of_object = object_limit(clock)
        self._of_node = RateLimit(NODE_BURST, NODE_SECONDS, clock)
        self.waiting: deque[tuple[Event, int]] = deque()  # with nanoseconds since the epoch
        self._sending = self._stopped = False
        self._condition = threading.Condition()
        self._last_error = ""
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)

    def start(self) -> None:
        if self._make_server:
            self._thread.start()

    def event(
        self, about: Reference, severity: Severity, reason: str, action: str, note: str
    ) -> None:
        """Record an event; returns at once, and never fails."""
        if self._make_server is None:
            return
        event = Event(about, severity, reason, action, note)
        with self._condition:
            if not self._allows(about):
                self.dropped += 1
                return
            if len(self.waiting) == QUEUE_SIZE:
                self.waiting.popleft()
                self.dropped += 1
            self.waiting.append((event, time.time_ns()))
            self._condition.notify_all()

    def stop(self) -> None:
        """Wait a short time for unsent events."""
        with self._condition:
            if self._thread.is_alive():
                self._condition.wait_for(self._is_idle, self._stop_timeout)
            self._stopped = True
            self._condition.notify_all()

    def _allows(self, about: Reference) -> bool:
        """Apply the limits; tenants' events do not use up the limit of events about the Node."""
        is_tenants = bool(about.key.namespace)
        return self._of_object.allows(about) and (not is_tenants or self._of_node.allows(None))

    def _is_idle(self) -> bool:
        return not self.waiting and not self._sending

    def _run(self) -> None:
        while waiting := self._next():
            event, at = waiting
            if not self._send(*manifest(event, self.instance, at)):
                with self._condition:
                    self.dropped += 1

    def _next(self) -> tuple[Event, int] | None:
        with self._condition:
            self._sending = False
            self._condition.notify_all()
            self._condition.wait_for(lambda: self.waiting or self._stopped)
            if self._stopped:
                return None
            self._sending = True
            return self.waiting.popleft()

    def _send(self, path: str, body: bytes) -> bool:
        backoff = Backoff(self._timing)
        for _ in range(ATTEMPTS):
            try:
                self._create(path, body)
            except Exception as error:
                self._failed(error)
                if isinstance(error, RequestRejected) or self._stopped_within(backoff.next()):
                    return False
            else:
                self._last_error = ""
                parts.succeeded(self._thread.name)
                return True
        return False

    def _failed(self, error: Exception) -> None:
        if not isinstance(error, EbpflbError | OSError):
            parts.failed(self._thread.name, error)
            return
        line, reason = "events cannot be sent to the API server: %s", redact(in_words(error))
        self._last_error = log_once(log.warning, line, reason, self._last_error)

    def _create(self, path: str, body: bytes) -> None:
        assert self._make_server is not None
        self._make_server().create(path, body)

    def _stopped_within(self, seconds: float) -> bool:
        with self._condition:
            return self._condition.wait_for(lambda: self._stopped, seconds)


def manifest(event: Event, instance: str, now: int) -> tuple[str, bytes]:
    """Return the path to POST the event to, and its JSON; ``now``: nanoseconds since the epoch."""
    key = event.about.key
    namespace = key.namespace or "default"
    regarding = {"kind": event.about.kind, "apiVersion": _VERSIONS.get(event.about.kind, "v1")}
    regarding |= {"name": key.name, "uid": str(key)}
    body: dict[str, Any] = {
        "apiVersion": "events.k8s.io/v1",
        "kind": "Event",
        "metadata": {"name": f"{key.name}.{now:x}", "namespace": namespace},
        "eventTime": f"{datetime.fromtimestamp(now // 1000 / 1e6, UTC):%Y-%m-%dT%H:%M:%S.%fZ}",
        "reportingController": CONTROLLER,
        "reportingInstance": instance,
        "regarding": regarding | ({"namespace": key.namespace} if key.namespace else {}),
        "type": event.severity,
        "reason": event.reason,
        "action": event.action,
        "note": event.note.encode()[:MAX_NOTE].decode(errors="ignore"),
    }
    path = f"/apis/events.k8s.io/v1/namespaces/{quote(namespace, safe='')}/events"
    return path, msgspec.json.encode(body)


def server_factory(options: ServerOptions) -> MakeServer:
    """Return a function that connects to the API server, when it is called first."""

    @cache
    def make() -> "api.Server":
        from ebpflb.cluster import api

        return api.Server(options, Timing())

    return make
