# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes API as a source: list, then watch, then watch again.

Each kind has a thread and a version to resume from. Without a version a turn begins with a list,
page by page, told as one ``Replaced``. Then comes a watch from that version: every line, bookmarks
too, moves the version on. A watch that ends or breaks is resumed there and misses nothing; one
that is told 410 Gone, at once or in its stream, forgets the version, and the next turn lists.
A server that is too old for a kind that we can do without has nothing of it.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from msgspec import Raw

from ebpflb.cluster import decoding
from ebpflb.cluster.pacing import Pace
from ebpflb.cluster.running import Runner
from ebpflb.cluster.selectors import Selector, selectors
from ebpflb.cluster.source import Emit, Observe, unobserved
from ebpflb.errors import ClusterError, InvalidObject
from ebpflb.model.events import Changed, Key, Kind, ReadObject, Removed, Replaced

log = logging.getLogger(__name__)

LIMIT = 500  # objects per page, as kubectl and client-go ask for
OPTIONAL = frozenset({Kind.SERVICE_CIDR})  # there since Kubernetes 1.33
SHORT = 1.0  # seconds: a watch that ends sooner, with nothing said, counts as a failure


class Server(Protocol):
    """What we need of ``api.Server``."""

    @property
    def url(self) -> str: ...

    def page(self, kind: Kind, query: dict[str, str]) -> bytes: ...

    def watch(
        self, kind: Kind, query: dict[str, str]
    ) -> AbstractContextManager[Iterator[bytes]]: ...


class Watcher:
    """One kind at one server, a turn at a time."""

    def __init__(
        self, kind: Kind, selector: Selector, server: Server, runner: Runner, *, limit: int = LIMIT
    ) -> None:
        self.version = ""
        self._kind = kind
        self._query = selector.query()
        self._server = server
        self._runner = runner
        self._limit = limit
        self._listed = False

    def turn(self) -> None:
        """List if there is nothing to resume from, then watch. Raises ClusterError."""
        try:
            if not self.version:
                self._list()
            self._watch()
        except decoding.Gone:
            self.version = ""
            raise
        except decoding.Absent as error:
            if self._kind not in OPTIONAL:
                raise
            self._do_without(error)

    def _do_without(self, error: ClusterError) -> None:
        """What was heard before stays, as it does in any other trouble."""
        self.version = ""
        self._runner.well()
        if not self._listed:
            log.info("%s: no %s here: %s", self._runner.source, self._kind, error)
            self._runner.emit(Replaced(self._kind, {}))
            self._listed = True
        self._runner.rest()

    def _list(self) -> None:
        objects: dict[Key, ReadObject] = {}
        metadata = self._page("", objects)
        while metadata.token:
            metadata = self._page(metadata.token, objects)
        self._runner.well()
        self._runner.emit(Replaced(self._kind, objects))
        self.version = metadata.resource_version
        self._listed = True

    def _page(self, token: str, objects: dict[Key, ReadObject]) -> decoding.ListMetadata:
        """Put one page into ``objects``; its bytes are gone when this returns."""
        query = self._query | {"limit": str(self._limit)}
        if token:
            query["continue"] = token
        page = decoding.page(self._server.page(self._kind, query))
        for item in page.items or ():
            objects.update(self._find(item))
        return page.metadata

    def _watch(self) -> None:
        query = self._query | {"resourceVersion": self.version, "allowWatchBookmarks": "true"}
        opened = time.monotonic()
        heard = False
        with self._server.watch(self._kind, query) as lines:
            self._runner.well()
            for line in lines:
                self._hear(line)
                self._runner.progress()
                heard = True
        if not heard and time.monotonic() - opened < SHORT:
            raise ClusterError("the watch ended as soon as it began")
        self._runner.progress()

    def _hear(self, data: bytes) -> None:
        """Tell of one line and move the version on. Raises Gone and ClusterError for ERROR."""
        try:
            line = decoding.line(data)
        except InvalidObject as error:
            log.warning("%s: no watch event: %s", self._runner.source, error)
            return
        if line.type == "ERROR":
            raise decoding.refusal(line.object)
        self._tell(line)

    def _tell(self, line: decoding.Line) -> None:
        identity = decoding.identify(line.object)
        if line.type == "DELETED" and identity.key:
            self._runner.emit(Removed(self._kind, identity.key))
        elif line.type in ("ADDED", "MODIFIED"):
            for key, found in self._find(line.object).items():
                self._runner.emit(Changed(self._kind, key, found))
        self.version = identity.version or self.version

    def _find(self, data: Raw) -> dict[Key, ReadObject]:
        """An object by its key; nothing but a line where that cannot be read."""
        try:
            return dict([decoding.find(self._kind, data, self._server.url)])
        except InvalidObject as error:
            log.warning("%s: %s without a name: %s", self._server.url, self._kind, error)
            return {}


class ApiSource:
    """A Kubernetes API server: one thread per kind. See ``source.Source``."""

    def __init__(
        self,
        emit: Emit,
        *,
        node_name: str,
        kubeconfig: Path | None = None,
        master: str = "",
        pace: Pace | None = None,
        limit: int = LIMIT,
        observe: Observe = unobserved,
    ) -> None:
        """Without ``kubeconfig`` we run in a pod; ``node_name`` is the Node object to watch, and
        ``master`` the server's URL where it is another.
        """
        self._emit = emit
        self._node_name = node_name
        self._kubeconfig = kubeconfig
        self._master = master
        self._pace = pace or Pace()
        self._limit = limit
        self._observe = observe
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Raises ClusterError if the configuration cannot be used."""
        from ebpflb.cluster import api

        self._server = api.Server(self._kubeconfig, self._pace, self._master, observe=self._observe)
        for kind, selector in selectors(self._node_name).items():
            source = self._server.url + api.PATHS[kind]
            runner = Runner(source, self._emit, self._pace, self._stopped)
            watcher = Watcher(kind, selector, self._server, runner, limit=self._limit)
            thread = threading.Thread(
                target=runner.run, args=(watcher.turn,), name=f"watch {kind}", daemon=True
            )
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """A request whose answer has not begun cannot be broken off: its thread ends later."""
        self._stopped.set()
        if self._threads:
            self._server.close()
        deadline = time.monotonic() + 1
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
