# SPDX-License-Identifier: Apache-2.0
"""The API servers: keep their addresses in a file, and notice within 2 s that one is gone.

The agent has one idle TLS connection to each of them.
The kernel asks an idle peer for an answer every second (TCP keepalive). An unanswered question is
visible in the socket's TCP_INFO at once, whereas the kernel ends the connection a second later.

A connection begins with an anonymous GET of /livez, because the API server logs an error for a
connection that ends before its TLS handshake, and ends one that sends no request. Any answer
counts. The certificate is not verified: nothing is sent that is secret, and nothing received is
used.
"""

import logging
import ssl
import threading
import time
from collections.abc import Callable, Collection
from contextlib import closing
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from socket import (
    IPPROTO_TCP,
    SO_KEEPALIVE,
    SOL_SOCKET,
    TCP_INFO,
    TCP_KEEPIDLE,
    TCP_KEEPINTVL,
)

import msgspec

from ebpflb import files
from ebpflb.errors import in_words
from ebpflb.model.api_servers import KeptApiServers, Place
from ebpflb.workers import Worker, readable

log = logging.getLogger(__name__)

MOST = 16  # API servers that are watched
ANSWER_SECONDS = 1.0  # for a connection and its request
RETRY_SECONDS = 1.0  # between two attempts to reach a server
_LARGEST_ANSWER = 1 << 16  # bytes
_POLL_SECONDS = 0.25
_UNANSWERED_POLLS = 2  # in succession: a longer round trip would be taken for silence
_PROBES = 3  # the offset of tcpi_probes in struct tcp_info: keepalives without an answer


class ApiServerWatch:
    """``on_change`` takes the servers that do not answer; any thread may call it."""

    def __init__(self, on_change: Callable[[frozenset[Place]], None]) -> None:
        self._on_change = on_change
        self._lock = threading.Lock()
        self._watched: dict[Place, _Connection] = {}
        self._silent: frozenset[Place] = frozenset()

    def set(self, places: Collection[Place]) -> None:
        """Watch these servers, at most MOST, and no others."""
        wanted = sorted(places, key=str)[:MOST]
        with self._lock:
            gone = [self._watched.pop(place) for place in self._watched.keys() - set(wanted)]
            new = [place for place in wanted if place not in self._watched]
            self._watched |= {place: _Connection(place, self._answers) for place in new}
            for each in gone:
                each.stopped.set()
            for place in new:
                self._watched[place].start()
            self._set_silent(self._silent.intersection(wanted))

    def stop(self) -> None:
        with self._lock:
            watched, self._watched = self._watched, {}
        for each in watched.values():
            each.stopped.set()
        for each in watched.values():
            each.stop()

    def _answers(self, place: Place, answers: bool) -> None:
        with self._lock:
            if place in self._watched:
                changed = self._silent - {place} if answers else self._silent | {place}
                self._set_silent(changed)

    def _set_silent(self, silent: frozenset[Place]) -> None:
        if silent != self._silent:
            self._silent = silent
            self._on_change(silent)


class _Connection(Worker):
    """Watches one server; ``report`` takes it, and whether it answers."""

    patience = 2 * ANSWER_SECONDS

    def __init__(self, place: Place, report: Callable[[Place, bool], None]) -> None:
        super().__init__(f"API server {place[0]}")
        self._place, self._report = place, report
        self._error = ""  # why it does not answer

    def run(self) -> None:
        while not self.stopped.is_set():
            begun = time.monotonic()
            try:
                with closing(self._connect()) as connection:
                    self._answers()
                    self._wait_for_end(connection)
            except (ssl.SSLError, HTTPException):  # an answer, of whatever speaks there
                self._answers()
            except OSError as error:
                self._fails(in_words(error))
            if time.monotonic() - begun < RETRY_SECONDS:
                self.stopped.wait(RETRY_SECONDS)

    def _answers(self) -> None:
        if self._error:
            log.warning("%s answers again", self.thread.name)
        self._error = ""
        self._report(self._place, True)

    def _fails(self, reason: str) -> None:
        if not self._error:
            log.warning("%s does not answer this node: %s", self.thread.name, reason)
        self._error = reason
        self._report(self._place, False)

    def _connect(self) -> HTTPSConnection:
        """Return a connection that has been answered. Raises OSError or HTTPException."""
        made = HTTPSConnection(*self._place, timeout=ANSWER_SECONDS, context=_unverified())
        try:
            made.request("GET", "/livez")
            made.getresponse().read(_LARGEST_ANSWER)
        except BaseException:
            made.close()
            raise
        return made

    def _wait_for_end(self, connection: HTTPSConnection) -> None:
        """Return when the server ends the connection. Raises OSError when it is silent."""
        if connection.sock is None:  # ended with the answer
            return
        for option, value in ((TCP_KEEPIDLE, 1), (TCP_KEEPINTVL, 1)):  # seconds
            connection.sock.setsockopt(IPPROTO_TCP, option, value)
        connection.sock.setsockopt(SOL_SOCKET, SO_KEEPALIVE, 1)
        polls = 0
        while not (self.stopped.is_set() or readable([connection.sock], _POLL_SECONDS)):
            unanswered = connection.sock.getsockopt(IPPROTO_TCP, TCP_INFO, _PROBES + 1)[_PROBES]
            polls = polls + 1 if unanswered else 0
            if polls == _UNANSWERED_POLLS:
                raise TimeoutError("no answer to a keepalive")


def _unverified() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


# The file of the API servers, which outlives a reboot, unlike the pinned maps.

_LARGEST_FILE = 1 << 16  # bytes


class ApiServersFile:
    """``on_change`` takes the API servers each time that they change, and those that were read."""

    def __init__(
        self, path: Path, on_change: Callable[[KeptApiServers], None] = lambda _: None
    ) -> None:
        self.path = path
        self._on_change = on_change
        self._last: KeptApiServers | None = None

    def read(self) -> KeptApiServers | None:
        """Return what an earlier agent has kept; None if there is nothing, or nothing usable."""
        self._last = files.decode_regular(self.path, KeptApiServers, _LARGEST_FILE)
        if self._last:
            self._on_change(self._last)
        return self._last

    def keep(self, found: KeptApiServers) -> None:
        """Write the file if the API servers have changed."""
        if found == self._last:
            return
        self._last = found
        self._on_change(found)
        try:
            files.replace(self.path, msgspec.json.encode(found))
        except OSError as error:
            log.warning("the API servers are not kept for the next start: %s", error)
