# SPDX-License-Identifier: Apache-2.0
"""The Kubernetes API as a source: list, then watch, then watch again.

Each kind has a thread, and a resource version up to which everything has been emitted. First the
objects are listed and emitted as one ``Replaced``. Then they are watched from that version on:
every line, bookmarks too, gives a newer version. A watch that ends or breaks is resumed from the
newest version and misses nothing. A watch that sends nothing, not even bookmarks, is resumed too:
its connection may be dead without TCP knowing.

The objects are listed again after 410 Gone, as an answer or within a watch, and after
``Timing.list_interval``, between two watches: this limits how long an event that a watch lost is
missing. client-go has no such lists.

Lists are requested as by client-go, so that the agents of all nodes do not read etcd: the first
list may be as old as the watch cache of the API server, later ones must not be older than the
emitted state. Only if the server does not have such a version, its newest one is requested, which
the server reads from etcd.

If the server is too old for an optional kind, the kind counts as empty.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator

from msgspec import Raw

from ebpflb.cluster import api, decoding
from ebpflb.cluster.decoding import query
from ebpflb.cluster.source import Emit, RetryLoop, ServerOptions, Timing
from ebpflb.errors import ClusterError, InvalidObject
from ebpflb.model.events import Changed, Key, Kind, ObjectEvent, ReadObject, Removed, Replaced
from ebpflb.redaction import redact

log = logging.getLogger(__name__)

ANY, NEWEST = "0", ""  # versions to list: any that the server has at hand, or the one in etcd
PAGE_LIMIT = 500  # objects per page, as kubectl and client-go ask for
OPTIONAL_KINDS = frozenset({Kind.SERVICE_CIDR})  # since Kubernetes 1.33
SHORT_WATCH = 1.0  # seconds: a watch that ends sooner and had no event counts as a failure


class ListWatch:
    """Lists and watches the objects of one kind."""

    def __init__(
        self,
        kind: Kind,
        query: dict[str, str],
        server: api.Server,
        loop: RetryLoop,
        *,
        limit: int = PAGE_LIMIT,
        first_version: str = ANY,
        on_silent: Callable[[str], None] = lambda kind: None,
    ) -> None:
        """``query`` has the selectors.

        ``first_version``: how old the first list may be, ANY or NEWEST. ``on_silent`` is called
        with the kind for each watch that sent nothing.
        """
        self._version = first_version  # where the next watch resumes; no list may be older
        self._must_list = True  # no version yet from which a watch could resume
        self._list_due = 0.0  # by the loop's clock
        self._on_silent = on_silent
        self._silent = False  # the last watch sent nothing, and was therefore opened again
        self._kind = kind
        self._query = query
        self._server = server
        self._loop = loop
        self._limit = limit
        self._listed = False

    def list_and_watch(self) -> None:
        """List if there is nothing to resume from, or if it is time, then watch.

        Raises ClusterError. A watch that sent nothing is an error once: if the next one also sends
        nothing, the server has no bookmarks to send, as for a kind without any changes so far.
        """
        try:
            if self._must_list:
                self._list()
            elif self._loop.monotonic() >= self._list_due:
                self._try_to_list()
            self._watch()
        except decoding.ResourceExpired:
            if self._must_list:  # the list itself failed
                self._version = NEWEST
            self._must_list = True
            raise
        except decoding.WatchSilent:
            self._on_silent(self._kind)
            if not self._silent:
                self._silent = True
                raise
        except decoding.ResourceNotFound as error:
            if self._kind not in OPTIONAL_KINDS:
                raise
            self._handle_missing(error)

    def _handle_missing(self, error: ClusterError) -> None:
        """Treat a missing resource as an empty list; objects received before stay."""
        self._must_list = True
        self._loop.clear_error()
        if not self._listed:
            log.info("%s: no %s here: %s", self._loop.source, self._kind, error)
            self._loop.emit(Replaced(self._kind, {}))
            self._listed = True
        self._loop.stopped.wait(self._loop.timing.missing_resource_delay)

    def _try_to_list(self) -> None:
        """List again; after an error the next watch resumes, and the objects are listed after it.

        A server that no longer has the version also tells the watch.
        """
        try:
            self._list()
        except ClusterError as error:
            log.warning("%s: not listed again: %s", self._loop.source, redact(str(error)))
            self._list_due = self._loop.monotonic() + self._loop.timing.watch_seconds()

    def _list(self) -> None:
        """List and emit. Raises ClusterError, or ResourceExpired if the list is too old."""
        objects: dict[Key, ReadObject] = {}
        metadata = self._read_page(self._which(), objects)
        while metadata.token:
            which = {"continue": metadata.token, "limit": str(self._limit)}
            metadata = self._read_page(which, objects)
        version = metadata.resource_version
        if decoding.is_older(version, self._version):
            old = f"the list is of version {version}, which is older than {self._version}"
            raise decoding.ResourceExpired(old)
        self._loop.note_received()
        self._loop.clear_error()
        self._loop.emit(Replaced(self._kind, objects, version))
        self._version, self._must_list, self._listed = version, not version, True
        self._list_due = self._loop.monotonic() + self._loop.timing.list_seconds()

    def _which(self) -> dict[str, str]:
        """Return parameters of the query, as in client-go.

        With a limit the API server would read etcd instead of its watch cache, except for ANY.
        """
        which = {}
        if self._version != NEWEST:
            which = {"resourceVersion": self._version, "resourceVersionMatch": "NotOlderThan"}
        if self._version in (ANY, NEWEST):
            which["limit"] = str(self._limit)
        return which

    def _read_page(
        self, which: dict[str, str], objects: dict[Key, ReadObject]
    ) -> decoding.ListMetadata:
        """Add one page to ``objects``. Raises ClusterError."""

        def add(item: Raw) -> None:
            objects.update(self._read_object(item))

        return decoding.read_list(self._server.page(self._kind, self._query | which), add)

    def _watch(self) -> None:
        query = self._query | {"resourceVersion": self._version, "allowWatchBookmarks": "true"}
        asked = self._loop.monotonic()
        with self._server.watch(self._kind, query) as lines:
            self._loop.clear_error()
            self._loop.note_received()
            self._read_lines(lines, asked)

    def _read_lines(self, lines: Iterator[bytes], asked: float) -> None:
        """Handle the lines until the watch ends.

        ``asked`` is when the watch was requested, by the loop's clock. Raises ClusterError if the
        watch breaks, or ends as soon as it began. Unless it was short and had no event, the next
        pause is the shortest one.
        """
        received, wrong = False, ""
        try:
            for line in lines:
                self._loop.note_received()
                self._silent = False
                try:
                    self._handle_line(line)
                except InvalidObject as error:
                    wrong = wrong or self._name_wrong_line(error)
                    continue
                received = True
        finally:
            is_useful = received or self._loop.monotonic() - asked >= SHORT_WATCH
            if is_useful:
                self._loop.reset_backoff()
        if not is_useful:
            raise ClusterError(wrong or "the watch ended as soon as it began")

    def _handle_line(self, data: bytes) -> None:
        """Emit the event of one line.

        Raises ResourceExpired or ClusterError for type ERROR, and InvalidObject for an invalid
        line.
        """
        line = decoding.line(data)
        if line.type == "ERROR":
            raise decoding.error_from_status(line.object)
        self._emit_line(line)

    def _name_wrong_line(self, error: InvalidObject) -> str:
        """Log the first invalid line of a watch; return the error."""
        wrong = f"not a watch event: {error}"
        log.warning("%s: %s", self._loop.source, wrong)
        return wrong

    def _emit_line(self, line: decoding.Line) -> None:
        identity = decoding.identify(line.object)
        event: ObjectEvent | None = None
        if line.type == "DELETED" and identity.key:
            event = Removed(self._kind, identity.key, identity.version)
        elif line.type in ("ADDED", "MODIFIED"):
            for key, found in self._read_object(line.object).items():
                event = Changed(self._kind, key, found, identity.version, line.type.lower())
        if event is not None:
            self._loop.emit(event)
        self._version = identity.version or self._version

    def _read_object(self, data: Raw) -> dict[Key, ReadObject]:
        """Return an object by its key; if the key cannot be read only a line is logged."""
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
        server_options: ServerOptions | None = None,
        timing: Timing | None = None,
        limit: int = PAGE_LIMIT,
        first_version: str = ANY,
        on_silent: Callable[[str], None] = lambda kind: None,
    ) -> None:
        """``node_name`` is the Node to watch, "" all; ``first_version``: see ListWatch."""
        self._emit = emit
        self._node_name = node_name
        self._server_options = server_options or ServerOptions()
        self._timing = timing or Timing()
        self._limit, self._first_version = limit, first_version
        self._on_silent = on_silent
        self._stopped = self._timing.new_event()
        self._threads: list[threading.Thread] = []
        self._loops: dict[Kind, RetryLoop] = {}

    def prepare(self) -> None:
        """Check the configuration. Raises ClusterError if it cannot be used; sends nothing."""
        self.server = api.Server(self._server_options, self._timing)

    def start(self) -> None:
        """Start the threads. Raises ClusterError if the configuration cannot be used."""
        if not hasattr(self, "server"):
            self.prepare()
        for kind in Kind:
            source = self.server.url + api.API_PATHS[kind]
            loop = RetryLoop(
                source, self._emit, self._timing, self._stopped, self._end_other_pauses
            )
            list_watch = ListWatch(
                kind,
                query(kind, self._node_name),
                self.server,
                loop,
                limit=self._limit,
                first_version=self._first_version,
                on_silent=self._on_silent,
            )
            thread = threading.Thread(
                target=loop.run,
                args=(list_watch.list_and_watch,),
                name=f"watch {kind}",
                daemon=True,
            )
            self._loops[kind] = loop
            self._threads.append(thread)
            thread.start()

    def received(self) -> dict[str, float]:
        """Return the times by kind, without kinds that the server lacks."""
        times = {str(kind): loop.received for kind, loop in self._loops.items()}
        return {kind: time for kind, time in times.items() if time is not None}

    def _end_other_pauses(self, recovered: RetryLoop) -> None:
        """Ask for the other kinds at once too: the server can be reached again."""
        for loop in list(self._loops.values()):
            if loop is not recovered:
                loop.end_pause()

    def stop(self) -> None:
        """Stop; a request without an answer yet cannot be cancelled, so its thread ends later."""
        self._stopped.set()
        for loop in self._loops.values():
            loop.end_pause()
        if self._threads:
            self.server.close()
        deadline = time.monotonic() + 1
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
