# SPDX-License-Identifier: Apache-2.0
"""Fresh lists of what a source has emitted, to be compared with what has become of it.

The objects are listed as they were at the version where the watch stands (resourceVersionMatch
Exact), page by page: until then all has been emitted, and what is emitted later is remembered. So
what differs differs, though objects change meanwhile. The server forgets versions after some
minutes, and a quiet kind may have no newer one; then the newest state is listed, and the watch has
``Timing.settle`` to tell of what it has not told yet.
"""

import logging
import threading
from collections.abc import Callable, Set
from queue import Empty, Full, Queue

from ebpflb.cluster.decoding import ListMetadata, ResourceExpired
from ebpflb.cluster.position import Position
from ebpflb.cluster.source import Objects
from ebpflb.errors import ClusterError, in_words
from ebpflb.model.events import Key, Kind, ReadObject

log = logging.getLogger(__name__)

ReadPage = Callable[[dict[str, str], dict[Key, ReadObject]], ListMetadata]
"""Reads the page that a query asks for into a dict; raises ClusterError."""


class PagedList:
    """See source.FreshList. A thread reads a page when the one before has been taken."""

    def __init__(
        self,
        kind: Kind,
        position: Position,
        read_page: ReadPage,
        end_watch: Callable[[], None],
        *,
        settle: float,
    ) -> None:
        self.kind = kind
        self._position, self._read_page, self._end_watch = position, read_page, end_watch
        self._settle = settle
        self._ended = threading.Event()

    @property
    def restarting(self) -> bool:
        return self._position.restarting

    def begin(self) -> bool:
        version = self._position.mark()
        if not version:
            return False
        self._pages: Queue[Objects | ClusterError] = Queue(maxsize=1)
        self._ended = threading.Event()
        run = self._pages, self._ended, version
        name = f"list {self.kind}"
        threading.Thread(target=self._run, args=run, name=name, daemon=True).start()
        return True

    def page(self) -> Objects | None:
        try:
            found = self._pages.get_nowait()
        except Empty:
            return None
        if isinstance(found, ClusterError):
            raise found
        return found

    def changed(self) -> Set[Key] | None:
        return self._position.since_mark()

    def distrust(self) -> None:
        self._position.distrust()
        self._end_watch()

    def end(self) -> None:
        self._ended.set()
        self._position.since_mark()

    def _run(
        self, pages: "Queue[Objects | ClusterError]", ended: threading.Event, version: str
    ) -> None:
        def give(found: Objects | ClusterError) -> bool:
            while not ended.is_set():
                try:
                    pages.put(found, timeout=1.0)
                    return True
                except Full:
                    pass
            return False

        try:
            exact = {"resourceVersion": version, "resourceVersionMatch": "Exact"}
            objects, query, wait = dict[Key, ReadObject](), exact, 0.0
            try:
                token = self._read_page(query, objects).token
            except ResourceExpired:
                wait = self._settle
                token = self._read_page({}, objects).token
            while give(objects) and token:
                objects = {}
                token = self._read_page({"continue": token}, objects).token
            ended.wait(wait)
            give({})
        except ClusterError as error:
            give(error)
        except Exception as error:
            # An error in this program; without this the audit would wait for the rest.
            log.exception("list %s: unexpected", self.kind)
            give(ClusterError(f"{type(error).__name__}: {in_words(error)}"))
