# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes API as a source: list, then watch, then watch again.

Each kind has a thread and a resource version to resume from. Without a version the objects are
listed, page by page, and emitted as one ``Replaced``. Then they are watched from that version on:
every line, bookmarks too, gives a newer version. A watch that ends or breaks is resumed from it and
misses nothing. After 410 Gone, as an answer or within a watch, the objects are listed again.
A server that is too old for an optional kind counts as one that has no object of it.
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
from ebpflb.cluster.retry import RetryLoop, Timing
from ebpflb.cluster.selectors import Selector, selectors
from ebpflb.cluster.source import Emit, Observe, unobserved
from ebpflb.errors import ClusterError, InvalidObject
from ebpflb.model.events import Changed, Key, Kind, ReadObject, Removed, Replaced

log = logging.getLogger(__name__)

PAGE_LIMIT = 500  # objects per page, as kubectl and client-go ask for
OPTIONAL_KINDS = frozenset({Kind.SERVICE_CIDR})  # since Kubernetes 1.33
SHORT_WATCH = 1.0  # seconds: a watch that ends sooner and was silent counts as a failure


class ListServer(Protocol):
    """The part of ``api.Server`` that is used here."""

    @property
    def url(self) -> str: ...

    def page(self, kind: Kind, query: dict[str, str]) -> bytes: ...

    def watch(
        self, kind: Kind, query: dict[str, str]
    ) -> AbstractContextManager[Iterator[bytes]]: ...


class ListWatch:
    """Lists and watches the objects of one kind; ``version`` is where the next watch resumes."""

    def __init__(
        self,
        kind: Kind,
        selector: Selector,
        server: ListServer,
        loop: RetryLoop,
        *,
        limit: int = PAGE_LIMIT,
    ) -> None:
        self.version = ""
        self._kind = kind
        self._query = selector.query()
        self._server = server
        self._loop = loop
        self._limit = limit
        self._listed = False

    def list_and_watch(self) -> None:
        """List if there is nothing to resume from, then watch. Raises ClusterError."""
        try:
            if not self.version:
                self._list()
            self._watch()
        except decoding.ResourceExpired:
            self.version = ""
            raise
        except decoding.ResourceNotFound as error:
            if self._kind not in OPTIONAL_KINDS:
                raise
            self._handle_missing(error)

    def _handle_missing(self, error: ClusterError) -> None:
        """What was received before stays, as it does after any other error."""
        self.version = ""
        self._loop.clear_error()
        if not self._listed:
            log.info("%s: no %s here: %s", self._loop.source, self._kind, error)
            self._loop.emit(Replaced(self._kind, {}))
            self._listed = True
        self._loop.wait_for_resource()

    def _list(self) -> None:
        objects: dict[Key, ReadObject] = {}
        metadata = self._page("", objects)
        while metadata.token:
            metadata = self._page(metadata.token, objects)
        self._loop.clear_error()
        self._loop.emit(Replaced(self._kind, objects))
        self.version = metadata.resource_version
        self._listed = True

    def _page(self, token: str, objects: dict[Key, ReadObject]) -> decoding.ListMetadata:
        """Adds one page to ``objects``, and frees its bytes before the next one is read."""
        query = self._query | {"limit": str(self._limit)}
        if token:
            query["continue"] = token
        page = decoding.page(self._server.page(self._kind, query))
        for item in page.items or ():
            objects.update(self._read_object(item))
        return page.metadata

    def _watch(self) -> None:
        query = self._query | {"resourceVersion": self.version, "allowWatchBookmarks": "true"}
        opened = time.monotonic()
        received = False
        with self._server.watch(self._kind, query) as lines:
            self._loop.clear_error()
            for line in lines:
                self._handle_line(line)
                self._loop.reset_backoff()
                received = True
        if not received and time.monotonic() - opened < SHORT_WATCH:
            raise ClusterError("the watch ended as soon as it began")
        self._loop.reset_backoff()

    def _handle_line(self, data: bytes) -> None:
        """Emits what one line reports. Raises ResourceExpired or ClusterError for type ERROR."""
        try:
            line = decoding.line(data)
        except InvalidObject as error:
            log.warning("%s: no watch event: %s", self._loop.source, error)
            return
        if line.type == "ERROR":
            raise decoding.error_from_status(line.object)
        self._emit_line(line)

    def _emit_line(self, line: decoding.Line) -> None:
        identity = decoding.identify(line.object)
        if line.type == "DELETED" and identity.key:
            self._loop.emit(Removed(self._kind, identity.key))
        elif line.type in ("ADDED", "MODIFIED"):
            for key, found in self._read_object(line.object).items():
                self._loop.emit(Changed(self._kind, key, found))
        self.version = identity.version or self.version

    def _read_object(self, data: Raw) -> dict[Key, ReadObject]:
        """An object by its key; only a log line if the key cannot be read."""
        try:
            return dict([decoding.read_object(self._kind, data, self._server.url)])
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
        timing: Timing | None = None,
        limit: int = PAGE_LIMIT,
        observe: Observe = unobserved,
    ) -> None:
        """Without ``kubeconfig`` the configuration is that of a pod. ``node_name`` is the Node to
        watch; ``master`` replaces the URL of the server.
        """
        self._emit = emit
        self._node_name = node_name
        self._kubeconfig = kubeconfig
        self._master = master
        self._timing = timing or Timing()
        self._limit = limit
        self._observe = observe
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Raises ClusterError if the configuration cannot be used."""
        from ebpflb.cluster import api

        self._server = api.Server(
            self._kubeconfig, self._timing, self._master, observe=self._observe
        )
        for kind, selector in selectors(self._node_name).items():
            source = self._server.url + api.PATHS[kind]
            loop = RetryLoop(source, self._emit, self._timing, self._stopped)
            list_watch = ListWatch(kind, selector, self._server, loop, limit=self._limit)
            thread = threading.Thread(
                target=loop.run,
                args=(list_watch.list_and_watch,),
                name=f"watch {kind}",
                daemon=True,
            )
            self._threads.append(thread)
            thread.start()

    def stop(self) -> None:
        """A request whose answer has not begun cannot be cancelled: its thread ends later."""
        self._stopped.set()
        if self._threads:
            self._server.close()
        deadline = time.monotonic() + 1
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
