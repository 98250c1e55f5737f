# SPDX-License-Identifier: Apache-2.0
"""A Kubernetes API server as a source: a thread for each kind lists and watches (list_watch.py)."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

from ebpflb.cluster.api_servers import ApiServers
from ebpflb.cluster.decoding import query
from ebpflb.cluster.list_watch import ANY, PAGE_LIMIT, ListWatch
from ebpflb.cluster.source import Emit, Observe, RetryLoop, Timing, unobserved
from ebpflb.model.events import Kind


class ApiSource:
    """A Kubernetes API server: one thread per kind. See ``source.Source``."""

    def __init__(
        self,
        emit: Emit,
        *,
        node_name: str,
        kubeconfig: Path | None = None,
        master: str = "",
        servers: ApiServers | None = None,
        timing: Timing | None = None,
        limit: int = PAGE_LIMIT,
        first_version: str = ANY,
        observe: Observe = unobserved,
        on_silent: Callable[[str], None] = lambda kind: None,
    ) -> None:
        """Without ``kubeconfig`` the configuration is that of a pod.

        ``node_name`` is the Node to watch; ``master`` and ``servers``: see api.Server.
        ``first_version``: see ListWatch.
        """
        self._emit = emit
        self._node_name = node_name
        self._kubeconfig = kubeconfig
        self._master, self._servers = master, servers
        self._timing = timing or Timing()
        self._limit, self._first_version = limit, first_version
        self._observe, self._on_silent = observe, on_silent
        self._stopped = self._timing.new_event()
        self._threads: list[threading.Thread] = []
        self._loops: dict[Kind, RetryLoop] = {}

    def prepare(self) -> None:
        """Check the configuration. Raises ClusterError if it cannot be used; sends nothing."""
        from ebpflb.cluster import api

        self.server = api.Server(
            self._kubeconfig,
            self._timing,
            self._master,
            servers=self._servers,
            observe=self._observe,
        )

    def start(self) -> None:
        """Start the threads. Raises ClusterError if the configuration cannot be used."""
        from ebpflb.cluster import api

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
