# SPDX-License-Identifier: Apache-2.0
"""A scripted API server, and the real source, whose threads run one at a time, as the steps say.

Each thread of the source waits before a request, before the next line of a watch, and in a pause.
``advance`` lets one of them go on until it waits again. So the schedule decides the order of all
events, and a virtual clock the times.
"""

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

from ebpflb.cluster.decoding import ResourceExpired, WatchSilent
from ebpflb.cluster.list_watch import ApiSource
from ebpflb.cluster.source import Emit, Timing
from ebpflb.errors import ClusterError
from ebpflb.model.events import Kind
from tests.simulation.cluster import Change, Cluster, Json, key_of
from tests.simulation.places import NODE

PAGE, SILENCE = 2, 5.0  # objects of a page; seconds
WATCH = 8.0  # seconds that a watch lasts
WAIT_SECONDS = 30.0  # real seconds


class Wait(NamedTuple):
    """What a thread waits for, and until when."""

    what: str
    until: float


class Thread:
    """One thread of the source, with what it waits for and whether it may run."""

    def __init__(self) -> None:
        self.may_run = threading.Semaphore(0)
        self.wait = Wait("start", 0.0)


class ScriptedApi:
    """The source's API server, used as ``api.Server``. The methods of the steps describe its
    faults.
    """

    url = "https://api"

    def __init__(self, cluster: Cluster, clock: Callable[[], float]) -> None:
        self.cluster, self.clock = cluster, clock
        self.threads = {kind: Thread() for kind in Kind}
        self.arrived = threading.Semaphore(0)
        self.is_closed = False
        self.oldest: dict[Kind, int] = dict.fromkeys(Kind, 0)  # from where on history is known
        self.refused: Counter[Kind] = Counter()  # so many requests fail
        self.lost: set[Kind] = set()  # whose connection breaks
        self.hung: set[Kind] = set()  # whose watch is silent, until it is opened again
        self.expired: set[Kind] = set()  # whose continue token is
        self.losing: set[Kind] = set()  # whose watch loses its next event
        self.has_lost: set[Kind] = set()  # whose watch has lost one, and no list has been since
        self.went_back: set[Kind] = set()  # whose list or watch was older than what had been told
        self._position: dict[Kind, int] = {}  # what has been told, by lists and watches

    def advance(self, kind: Kind) -> bool:
        """Let a thread continue, if the thing that it waits for has happened."""
        if not self._can_run(kind):
            return False
        self.threads[kind].may_run.release()
        if not self.arrived.acquire(timeout=WAIT_SECONDS):
            raise AssertionError(f"the thread of {kind} has ended, or waits for something else")
        if self.went_back:
            raise AssertionError(f"the agent goes back to what it had been told of {kind}")
        return True

    def is_current(self, kind: Kind) -> bool:
        """Whether the watch of this kind, or a list after it, has reported everything."""
        is_watching = self.threads[kind].wait.what == "line"
        faults = self.hung | self.lost | self.has_lost
        return is_watching and not self._line(kind) and kind not in faults

    def _can_run(self, kind: Kind) -> bool:
        wait = self.threads[kind].wait
        if wait.what == "line" and (kind in self.lost or self._has_line(kind)):
            return True
        return wait.what not in ("line", "pause") or self.clock() >= wait.until

    def _has_line(self, kind: Kind) -> bool:
        return kind not in self.hung and self._line(kind) is not None

    def _line(self, kind: Kind) -> Change | None:
        history = self.cluster.history[kind]
        after = self._position[kind]
        return next((change for change in history if change.version > after), None)

    # In the threads of the source

    def wait(self, what: str, until: float = 0.0) -> None:
        """Wait until the schedule lets this thread continue."""
        thread = self.threads[Kind(threading.current_thread().name.removeprefix("watch "))]
        thread.wait = Wait(what, until)
        self.arrived.release()
        thread.may_run.acquire()
        if self.is_closed:
            raise ClusterError("stopped")

    def _request(self, kind: Kind, what: str) -> None:
        self.wait(what)
        if self.refused[kind]:
            self.refused[kind] -= 1
            raise ClusterError("503 scripted")

    def page(self, kind: Kind, query: dict[str, str]) -> Iterator[bytes]:
        self._request(kind, "page")
        token = query.get("continue", "")
        if token and kind in self.expired:
            self.expired.discard(kind)
            raise ResourceExpired("410 scripted")
        version, start = map(int, token.split(".")) if token else (self._listed(kind, query), 0)
        found = self._as_of(kind, version)
        if version < self._position.get(kind, 0):
            self.went_back.add(kind)
        metadata = {"resourceVersion": str(version)}
        if len(found) > start + PAGE:
            metadata["continue"] = f"{version}.{start + PAGE}"
        else:
            self._position[kind] = version
            self.has_lost.discard(kind)
        yield json.dumps({"metadata": metadata, "items": found[start : start + PAGE]}).encode()

    def _listed(self, kind: Kind, query: dict[str, str]) -> int:
        """Return the version of a list: the watch cache is behind, but has the requested
        version.
        """
        newest = self.cluster.version
        if "resourceVersion" not in query:
            return newest
        return max(int(query["resourceVersion"]), self.oldest[kind], newest - 1)

    def _as_of(self, kind: Kind, version: int) -> list[Json]:
        """Return the pages of a list, all of the same version."""
        found: dict[object, Json] = {}
        for change in self.cluster.history[kind]:
            if change.version <= version:
                found.pop(change.key, None)
                if change.type != "DELETED":
                    found[key_of(change.object)] = change.object
        return list(found.values())

    @contextmanager
    def watch(self, kind: Kind, query: dict[str, str]) -> Iterator[Iterator[bytes]]:
        self._request(kind, "watch")
        version = int(query["resourceVersion"])
        if version < self.oldest[kind]:
            raise ResourceExpired("410 scripted")
        if version < self._position[kind]:
            self.went_back.add(kind)
        self.hung.discard(kind)
        self.lost.discard(kind)
        self._position[kind] = version
        yield self._lines(kind)

    def _lines(self, kind: Kind) -> Iterator[bytes]:
        end = self.clock() + WATCH
        while True:
            until = self.clock() + SILENCE
            self.wait("line", min(until, end))
            if kind in self.hung:
                self.wait("line", until)  # a dead connection does not end
            elif self.clock() >= end:
                return
            if kind in self.lost:
                return
            change = self._line(kind) if kind not in self.hung else None
            if change is None:
                if kind in self.hung:
                    raise WatchSilent("scripted")
                yield self._bookmark(self.cluster.version)
                continue
            if self._position[kind] < self.oldest[kind]:
                gone = {"kind": "Status", "code": 410, "message": "scripted"}
                yield json.dumps({"type": "ERROR", "object": gone}).encode()
            self._position[kind] = change.version
            if kind in self.losing:
                self.losing.discard(kind)
                self.has_lost.add(kind)
                yield self._bookmark(change.version)
                continue
            yield json.dumps({"type": change.type, "object": change.object}).encode()

    def _bookmark(self, version: int) -> bytes:
        metadata = {"resourceVersion": str(version)}
        return json.dumps({"type": "BOOKMARK", "object": {"metadata": metadata}}).encode()

    def close(self) -> None:
        """End all threads."""
        self.is_closed = True
        for thread in self.threads.values():
            thread.may_run.release()


class Pauses(threading.Event):
    """Waits that end when the schedule says so."""

    def __init__(self, api: ScriptedApi) -> None:
        super().__init__()
        self._api = api

    def wait(self, timeout: float | None = None) -> bool:
        if not self.is_set() and timeout:
            with suppress(ClusterError):
                self._api.wait("pause", self._api.clock() + timeout)
        return self.is_set()


class ScriptedSource(ApiSource):
    """The real source, connected to the scripted server."""

    def __init__(self, emit: Emit, api: ScriptedApi) -> None:
        timing = Timing(
            backoff_max=2.0,
            watch_timeout=WATCH,
            list_interval=20.0,
            jitter=lambda: 0.5,
            clock=api.clock,
            monotonic=api.clock,
            new_event=lambda: Pauses(api),
        )
        super().__init__(emit, node_name=NODE, timing=timing, limit=PAGE)
        self._api = api

    def prepare(self) -> None:
        server: object = self._api
        self.server = server  # type: ignore[assignment]

    def start(self) -> None:
        super().start()
        for _ in Kind:
            self._api.arrived.acquire()
