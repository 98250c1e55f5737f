# SPDX-License-Identifier: Apache-2.0
"""Requests to the API server.

The client's models are not used: they would take four times the time and eight times the memory of
msgspec. Requests go through a urllib3 pool (with a kubeconfig the client's own: certificates,
proxy), without retries, as bytes.
"""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

from urllib3 import BaseHTTPResponse, Timeout
from urllib3.exceptions import HTTPError, ReadTimeoutError

from ebpflb.cluster.access import open_access
from ebpflb.cluster.api_servers import ApiServers
from ebpflb.cluster.decoding import WatchSilent, error_from_status, error_from_write
from ebpflb.cluster.source import ServerOptions, Timing
from ebpflb.errors import ClusterError, in_words
from ebpflb.model.events import Kind
from ebpflb.redaction import redact

# Read the API server's answers within bounded memory, whatever it sends.
#
# Compressed answers are not requested, and not expanded: they count as invalid.

# An object has up to 1.5 MB in etcd, but most are small. The watch cache sends all objects of a
# kind in one page: 100,000 endpoints have some 40 MB.
LARGEST_PAGE, LARGEST_LINE, LARGEST_STATUS = 512 << 20, 16 << 20, 1 << 20  # bytes


def read_parts(response: BaseHTTPResponse, largest: int) -> Iterator[bytes]:
    """Yield the parts of an answer.

    Raises ClusterError for more than ``largest`` bytes, and the errors of the connection.
    """
    size = 0
    for part in response.stream(decode_content=False):
        size += len(part)
        if size > largest:
            raise ClusterError(f"the answer has more than {largest} bytes")
        yield part


def read_lines(response: BaseHTTPResponse) -> Iterator[bytes]:
    """Yield the complete lines of an answer.

    Raises ClusterError for a line of more than LARGEST_LINE bytes, and the errors of the
    connection.
    """
    begun, size = list[bytes](), 0
    for part in response.stream(decode_content=False):
        *ended, rest = part.split(b"\n")
        if ended:
            yield b"".join([*begun, ended[0]])
            yield from ended[1:]
            begun, size = [], 0
        begun.append(rest)
        size += len(rest)
        if size > LARGEST_LINE:
            raise ClusterError(f"a line of the watch has more than {LARGEST_LINE} bytes")


log = logging.getLogger(__name__)

API_PATHS = {
    Kind.SERVICE: "/api/v1/services",
    Kind.ENDPOINT_SLICE: "/apis/discovery.k8s.io/v1/endpointslices",
    Kind.NODE: "/api/v1/nodes",
    Kind.SERVICE_CIDR: "/apis/networking.k8s.io/v1/servicecidrs",
}
KEEPALIVE = [  # a vanished API server is noticed after 10 + 3 * 5 s, not at the watch's end
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 10),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]
CONNECT_TIMEOUT = 3.0  # seconds
SERVER_ERRORS = 500  # the first status: the server cannot answer, but another one may
UNAUTHORIZED = 401
JSON = "application/json"


class Server:
    """An API server.

    Raises ClusterError if the configuration cannot be used; the constructor sends nothing.
    """

    def __init__(self, options: ServerOptions, timing: Timing) -> None:
        self._options, self._servers = options, options.servers or ApiServers()
        self.url = ""
        self._configure()
        self._timing = timing
        self._open: set[BaseHTTPResponse] = set()
        self._lock = threading.Lock()
        self._closed = False

    def page(self, kind: Kind | str, query: dict[str, str]) -> Iterator[bytes]:
        """Yield one page of a list, as it arrives; ``kind`` may be a path.

        Raises ClusterError, or ResourceExpired for a version or a continue token that the server no
        longer has.
        """
        with (
            self._get(kind, query, read_timeout=self._timing.answer_timeout) as response,
            _as_cluster_errors(self._where(response.url)),
        ):
            yield from read_parts(response, LARGEST_PAGE)

    @contextmanager
    def watch(self, kind: Kind, query: dict[str, str]) -> Iterator[Iterator[bytes]]:
        """Yield the lines of a watch, until it ends or its connection breaks.

        Raises ClusterError, ResourceExpired if the history does not reach back far enough, and
        WatchSilent, also while lines are read, if nothing arrives for ``Timing.watch_silence``.
        """
        seconds = self._timing.watch_seconds()
        query = query | {"watch": "true", "timeoutSeconds": str(seconds)}
        silence = min(self._timing.watch_silence, seconds + self._timing.watch_grace)
        with self._get(kind, query, read_timeout=silence) as response:
            yield self._lines(response, silence)

    def create(self, path: str, body: bytes) -> None:
        """Create an object (JSON). Raises ClusterError, or RequestRejected if it is invalid."""
        self._write("POST", path, body, JSON)

    def patch(self, path: str, content_type: str, body: bytes) -> None:
        """Change an object. Raises as ``create``."""
        self._write("PATCH", path, body, content_type)

    def _write(self, method: str, path: str, body: bytes, content_type: str) -> None:
        with _as_cluster_errors():
            response = self._request(
                method,
                path,
                content_type,
                body=body,
                timeout=Timeout(connect=CONNECT_TIMEOUT, read=self._timing.answer_timeout),
                preload_content=False,
            )
        with closing(response):
            answer = _status(response)
        if response.status // 100 != 2:
            raise error_from_write(answer, response.status, self._where(response.url))

    def close(self) -> None:
        """End every answer that is being read: the reading thread sees a broken connection."""
        with self._lock:
            self._closed = True
            for response in self._open:
                _shut_down(response)

    def _lines(self, response: BaseHTTPResponse, silence: float) -> Iterator[bytes]:
        try:
            yield from read_lines(response)
        except ReadTimeoutError as error:
            expected = "although the API server sends a bookmark every minute"
            raise WatchSilent(f"the watch sent nothing for {silence:g} s, {expected}") from error
        except (HTTPError, OSError) as error:
            log.debug("%s: a watch broke off: %s", self.url, error)

    @contextmanager
    def _get(
        self, kind: Kind | str, query: dict[str, str], *, read_timeout: float
    ) -> Iterator[BaseHTTPResponse]:
        with _as_cluster_errors():
            response = self._request(
                "GET",
                API_PATHS[kind] if isinstance(kind, Kind) else kind,
                fields=query,
                timeout=Timeout(connect=CONNECT_TIMEOUT, read=read_timeout),
                preload_content=False,
            )
        with self._registered(response):
            if response.status != 200:
                where = self._where(response.url)
                raise error_from_status(_status(response), response.status, where)
            yield response

    def _request(
        self, method: str, path: str, content_type: str = JSON, **how: Any
    ) -> BaseHTTPResponse:
        """Send a request; try again if the kubeconfig, or the file of its token, has changed.

        The token, the CA or the address of the server may have been renewed.
        """
        if self._access.lacks_credentials:
            self._configure()
        access, refused = self._access, self._headers(content_type)
        try:
            response = self._send_in_turn(method, path, headers=refused, **how)
        except HTTPError:
            if not access.is_outdated:
                raise
            self._configure()
            return self._send_in_turn(method, path, headers=self._headers(content_type), **how)
        if response.status == UNAUTHORIZED:
            self._configure()
            if (headers := self._headers(content_type)) != refused:
                response.close()
                return self._send_in_turn(method, path, headers=headers, **how)
        return response

    def _send_in_turn(self, method: str, path: str, **how: Any) -> BaseHTTPResponse:
        """Send a request to the first server that answers. Raises the last one's HTTPError."""
        are_verified = self._access.is_verified
        *others, last = self._servers.in_turn(self.url, are_verified=are_verified)
        for url in others:
            with suppress(HTTPError):
                return self._send(url, method, path, **how)
        return self._send(last, method, path, **how)

    def _send(self, url: str, method: str, path: str, **how: Any) -> BaseHTTPResponse:
        for each in filter(None, (url, self._access.proxy)):
            self._servers.find(each)
        began, code = time.monotonic(), None
        try:
            response = self._pool.request(method, url + path, retries=False, **how)
            code, response.url = response.status, url
            return response
        except HTTPError as error:
            raise HTTPError(f"{self._where(url)}{in_words(error)}") from error
        finally:
            if code is None or code >= SERVER_ERRORS:
                self._servers.failed(url)
            else:
                self._servers.answered(url)
            self._options.observe(method, url, code, time.monotonic() - began)

    def _where(self, url: str | None) -> str:
        """Name the server that failed in an error; sources are called by the usual one's URL."""
        return "" if url == self.url else f"{url}: "

    def _configure(self) -> None:
        """Read the kubeconfig and the files that it names. Raises ClusterError."""
        access = open_access(self._options.kubeconfig, self._options.master, self._servers.own)
        try:
            pool = access.pool(KEEPALIVE)
        except (HTTPError, ValueError) as error:  # an invalid proxy
            raise ClusterError(f"proxy: {redact(in_words(error))}") from None
        self._access, self._pool, self.url = access, pool, access.url

    def _headers(self, content_type: str) -> dict[str, str]:
        headers = {"Accept": JSON, "Content-Type": content_type}
        return headers | self._access.headers()

    @contextmanager
    def _registered(self, response: BaseHTTPResponse) -> Iterator[None]:
        with self._lock:
            self._open.add(response)
            if self._closed:
                _shut_down(response)
        try:
            yield
        finally:
            with self._lock:
                self._open.remove(response)
                response.close()


def _status(response: BaseHTTPResponse) -> bytes:
    with _as_cluster_errors():
        return b"".join(read_parts(response, LARGEST_STATUS))


def _shut_down(response: BaseHTTPResponse) -> None:
    """Call shutdown(2), not close(2): it wakes a thread that is reading."""
    with suppress(ValueError, RuntimeError, OSError):
        response.shutdown()


@contextmanager
def _as_cluster_errors(where: str = "") -> Iterator[None]:
    """Turn errors of the libraries into ClusterError, which begins with ``where``.

    The original error is left out, because it may quote a header.
    """
    try:
        yield
    except ClusterError:
        raise
    except (HTTPError, OSError, ValueError) as error:
        raise ClusterError(where + redact(in_words(error))) from None
