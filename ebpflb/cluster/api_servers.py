# SPDX-License-Identifier: Apache-2.0
"""Several API servers, tried in turn: which one to ask next.

The server that answered last is asked again. One that fails is left out for a pause that doubles
with each failure. The agent's own servers come first, as they were given; then those that the
cluster has named: the endpoints of the Service ``default/kubernetes``.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from ipaddress import ip_address
from socket import IPPROTO_TCP, getaddrinfo
from urllib.parse import urlsplit

from ebpflb.model.addresses import Address

Endpoint = tuple[Address, int]
PAUSE_FIRST, PAUSE_LONGEST = 1.0, 30.0  # seconds: 1, 2, 4, ... 30


class ApiServers:
    """The URLs; any thread may ask, and report the result. ``clock`` is monotonic, in seconds.

    ``on_reached`` takes the addresses and ports of the servers that are asked, each time that they
    change.
    """

    def __init__(
        self,
        own: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
        *,
        on_reached: Callable[[frozenset[Endpoint]], None] = lambda _: None,
    ) -> None:
        self.own = tuple(own)
        self._on_reached = on_reached
        self._reached: dict[str, frozenset[Endpoint]] = {}  # URL -> its places
        self._found: set[str] = set()  # URLs that were looked up since their last failure
        self._named: tuple[str, ...] = ()
        self._clock, self._lock = clock, threading.Lock()
        self._current = ""
        self._pauses: dict[str, tuple[float, float]] = {}  # of failed ones: the length and its end

    def name(self, urls: Iterable[str]) -> None:
        """Take the servers that the cluster names; an empty list leaves the former ones."""
        named = tuple(urls)
        with self._lock:
            self._named = named or self._named

    def in_turn(self, usual: str, *, are_verified: bool = True) -> list[str]:
        """Return the servers to try for a request, the best one first; never an empty list.

        ``usual`` is the server if none was given. Those that the cluster names get credentials only
        if ``are_verified``: whoever writes an EndpointSlice can name one.
        """
        with self._lock:
            named = self._named if are_verified else ()
            known = list(dict.fromkeys([*(self.own or (usual,)), *named]))
            now = self._clock()
            able = [url for url in known if self._end_of_pause(url) <= now]
            if not able:
                return [min(known, key=self._end_of_pause)]
            return sorted(able, key=lambda url: url != self._current)

    def find(self, url: str) -> None:
        """Look up the URL's addresses, unless they are known since its last failure.

        Former addresses stay until others are found.
        """
        with self._lock:
            if url in self._found:
                return
            self._found.add(url)
        if (places := _places(url)) and places != self._reached.get(url):
            with self._lock:
                self._reached[url] = places
                self._on_reached(frozenset().union(*self._reached.values()))

    def answered(self, url: str) -> None:
        with self._lock:
            self._current = url
            self._pauses.pop(url, None)

    def failed(self, url: str) -> None:
        with self._lock:
            self._found.discard(url)
            length, _ = self._pauses.get(url, (PAUSE_FIRST / 2, 0.0))
            length = min(2 * length, PAUSE_LONGEST)
            self._pauses[url] = length, self._clock() + length

    def _end_of_pause(self, url: str) -> float:
        return self._pauses[url][1] if url in self._pauses else 0.0


def _places(url: str) -> frozenset[Endpoint]:
    """Return the addresses and the port of a URL; none if its name is not known now."""
    parts, found = urlsplit(url), set[Endpoint]()
    port = parts.port or {"https": 443}.get(parts.scheme, 80)
    with suppress(OSError):
        for *_, (address, *_) in getaddrinfo(parts.hostname, port, proto=IPPROTO_TCP):
            found.add((ip_address(address), port))
    return frozenset(found)
