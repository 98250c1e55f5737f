# SPDX-License-Identifier: Apache-2.0
"""The interface of every source, which is all that the agent needs, and how a source is made.

The two sources are ``list_watch.ApiSource`` and ``manifests.ManifestSource``. Each emits
every kind first as ``Replaced``, then as ``Changed`` and ``Removed``; ApiSource sometimes as
``Replaced`` again.
"""

import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from ebpflb.cluster.api_servers import ApiServers
from ebpflb.cluster.decoding import Forbidden
from ebpflb.errors import ClusterError
from ebpflb.model.events import Event, SourceStatus, Together
from ebpflb.redaction import redact
from ebpflb.stopping import parts

Emit = Callable[[Event | Together], None]
"""Takes an event from any thread and returns soon, such as a queue's ``put``."""

Observe = Callable[[str, str, int | None, float], None]
"""Receives method, URL and status of each request to an API server, and the seconds until its
answer began.

The status is None without an answer.

Called from any thread.
"""


class ServerOptions(NamedTuple):
    """How to reach an API server: by kubeconfig or, if that is None, as the pod that we run in.

    ``master`` overrides the kubeconfig's URL; alone it means no credentials. ``servers`` are asked
    in turn instead, with the same credentials.
    """

    kubeconfig: Path | None = None
    master: str = ""
    servers: ApiServers | None = None
    observe: Observe = lambda method, url, code, seconds: None


class Source(Protocol):
    """A source: started once, stopped once; in between it emits events from its threads."""

    def received(self) -> Mapping[str, float]:
        """Return when the source last sent anything, by kind of object or for all kinds together.

        The times are in seconds since the epoch; a kind that never arrived is missing. May be
        called from any thread.
        """

    def prepare(self) -> None:
        """Check the configuration.

        Raises ClusterError if it cannot work at all; changes nothing.
        """

    def start(self) -> None:
        """Begin to emit. Raises ClusterError if the configuration cannot work at all."""

    def stop(self) -> None:
        """Stop emitting; the threads end within about a second."""


def make_source(emit: Emit, *, node_name: str, manifests: Path | None, **api: Any) -> Source:
    """Return the source of the cluster's objects, not yet started.

    ``api``: the arguments of ApiSource, for which ``manifests`` is None. Only the source in use
    is imported.
    """
    if manifests is not None:
        from ebpflb.cluster.manifests import ManifestSource

        return ManifestSource(emit, directory=manifests, node_name=node_name)
    from ebpflb.cluster.list_watch import ApiSource

    return ApiSource(emit, node_name=node_name, **api)


# Retry forever: the loop of each source, its growing pauses, and all other waits.
#
# An attempt is a function that returns when there is reason for another one, and raises when it
# failed. A failure is reported as ``SourceStatus`` once per error and followed by a growing pause.
# All times are in ``Timing``, so that a test can shorten them.


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """All times in seconds; ``jitter`` returns random numbers, uniform in [0, 1)."""

    backoff_first: float = 0.25  # pauses after failures: up to 0.25, 0.5, 1, 2, ... 30
    backoff_max: float = 30.0
    answer_timeout: float = 30.0  # maximum silence while a request is answered
    watch_timeout: float = 300.0  # a watch lasts this to twice this, as in client-go
    # The silence of a watch that means a dead connection: two bookmarks, which the API server sends
    # once a minute or a little later, did not arrive; and silence beyond the watch's end.
    watch_silence: float = 150.0
    watch_grace: float = 15.0
    # Between two lists, this to twice this: an API server answers the lists of all nodes.
    list_interval: float = 4 * 3600.0
    missing_resource_delay: float = 300.0  # an older server may be replaced by one that has it
    settled_after: float = 1.0  # a scan reads a file that did not change for this time
    rescan_interval: float = 30.0  # a directory is scanned this often even if inotify is silent
    jitter: Callable[[], float] = random.random
    clock: Callable[[], float] = time.time  # seconds since the epoch
    monotonic: Callable[[], float] = time.monotonic
    new_event: Callable[[], threading.Event] = threading.Event  # its waits are the pauses

    def watch_seconds(self) -> int:
        """Return the next watch's duration: random, so that nodes do not reconnect together."""
        return max(1, int(self.watch_timeout * (1 + self.jitter())))

    def list_seconds(self) -> float:
        """Return the time until the next list: random, so that nodes do not list together."""
        return self.list_interval * (1 + self.jitter())


class Backoff:
    """Pauses that double up to the maximum, each between half and all of its length."""

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._length = timing.backoff_first

    def next(self) -> float:
        """Return the pause after one more failure, in seconds."""
        pause = self._length * (1 + self._timing.jitter()) / 2
        self._length = min(self._length * 2, self._timing.backoff_max)
        return pause

    def reset(self) -> None:
        """Note a success: the next pause is the first one again."""
        self._length = self._timing.backoff_first


class RetryLoop:
    """Repeat attempts until stopped; ``source`` is the name in the SourceStatus."""

    def __init__(
        self,
        source: str,
        emit: Emit,
        timing: Timing,
        stopped: threading.Event,
        on_recovery: Callable[["RetryLoop"], None] = lambda loop: None,
    ) -> None:
        """``on_recovery`` is called when the source can be read again after an error."""
        self.source = source
        self.stopped, self._no_pause = stopped, timing.new_event()
        self._on_recovery = on_recovery
        self._emit = emit
        self.timing = timing
        self.monotonic = timing.monotonic
        self._backoff = Backoff(timing)
        self._error: str | None = None
        self._received_at: float | None = None  # of the monotonic clock

    def run(self, attempt: Callable[[], None]) -> None:
        while not self.stopped.is_set():
            self._no_pause.wait(self.run_once(attempt))
            self._no_pause.clear()

    def end_pause(self) -> None:
        """End the pause, or skip the next one; pauses begin with the first again.

        Called from another thread: after ``stopped`` was set, or when an attempt will probably
        succeed.
        """
        self._backoff.reset()
        self._no_pause.set()

    def run_once(self, attempt: Callable[[], None]) -> float:
        """Make one attempt; return the pause before the next one, in seconds."""
        try:
            attempt()
        except ClusterError as error:
            self._report(str(error), is_forbidden=isinstance(error, Forbidden))
        except Exception as error:
            parts.failed(self.source, error)
        else:
            parts.succeeded(self.source)
            return 0.0
        return self._backoff.next()

    def emit(self, event: Event | Together) -> None:
        """Pass the event to the agent, unless the source has been stopped."""
        if not self.stopped.is_set():
            self._emit(event)

    def note_received(self) -> None:
        """Note that the source has sent something, even if nothing is new."""
        self._received_at = self.monotonic()

    @property
    def received(self) -> float | None:
        """When the source last sent anything, in seconds since the epoch, by the current clock.

        The time since then is monotonic, so jumps of the clock do not count as elapsed time.
        """
        at = self._received_at
        return None if at is None else self.timing.clock() - (self.monotonic() - at)

    def clear_error(self) -> None:
        """Report that the source can be read: the last error is over."""
        had_error = self._error is not None
        parts.succeeded(self.source)
        self._report(None)
        if had_error:
            self._on_recovery(self)

    def reset_backoff(self) -> None:
        """Note that the source worked: the next failure is a first one."""
        self._backoff.reset()

    def _report(self, error: str | None, *, is_forbidden: bool = False) -> None:
        error = error and redact(error)  # a server may repeat secrets that it was sent
        if error != self._error:
            self._error = error
            self.emit(SourceStatus(self.source, error, is_forbidden))
