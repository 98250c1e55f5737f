# SPDX-License-Identifier: Apache-2.0
"""The only import of ``kubernetes``: configuration, authentication and transport, nothing else.

Import it only when there is an API server: the client costs 16 MB and 0.4 s, and before release 37,
which imports its typed models when they are used, 40 MB. No supported import takes less: the
package's ``__init__`` imports every part, with requests, oauthlib and pydantic. The models are not
used: they would take four times the time and eight times the memory of msgspec.
Requests go through the client's own urllib3 pool (certificates, proxy), unretried, as bytes.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from socket import IPPROTO_TCP, SO_KEEPALIVE, SOL_SOCKET, TCP_KEEPIDLE, TCP_KEEPINTVL, TCP_NODELAY
from typing import Any

from kubernetes import config
from kubernetes.client import Configuration
from kubernetes.client.rest import RESTClientObject
from urllib3 import BaseHTTPResponse, PoolManager, Timeout
from urllib3.exceptions import HTTPError

from ebpflb.cluster.decoding import error_from_status, error_from_write
from ebpflb.cluster.retry import Timing
from ebpflb.cluster.source import Observe, unobserved
from ebpflb.errors import ClusterError
from ebpflb.model.events import Kind

log = logging.getLogger(__name__)

PATHS = {
    Kind.SERVICE: "/api/v1/services",
    Kind.ENDPOINT_SLICE: "/apis/discovery.k8s.io/v1/endpointslices",
    Kind.NODE: "/api/v1/nodes",
    Kind.SERVICE_CIDR: "/apis/networking.k8s.io/v1/servicecidrs",
}
KEEPALIVE = [  # an API server that vanished is noticed after 30 + 9 * 15 s, not at the watch's end
    (IPPROTO_TCP, TCP_NODELAY, 1),
    (SOL_SOCKET, SO_KEEPALIVE, 1),
    (IPPROTO_TCP, TCP_KEEPIDLE, 30),
    (IPPROTO_TCP, TCP_KEEPINTVL, 15),
]
CONNECT_TIMEOUT = 10.0  # seconds
UNAUTHORIZED = 401


class Server:
    """An API server, by kubeconfig or, if that is None, the one of the pod that we run in.

    ``master`` is its URL where that is not the kubeconfig's; alone it does without credentials.

    Raises ClusterError if the configuration cannot be used; nothing is sent yet.
    """

    def __init__(
        self,
        kubeconfig: Path | None,
        timing: Timing,
        master: str = "",
        *,
        observe: Observe = unobserved,
    ) -> None:
        self._observe = observe
        self._config_source = kubeconfig, master
        self._configure()
        self._timing = timing
        self._open: set[BaseHTTPResponse] = set()
        self._lock = threading.Lock()
        self._closed = False
        self.url: str = self._configuration.host

    def page(self, kind: Kind, query: dict[str, str]) -> bytes:
        """One page of a list. Raises ClusterError, or ResourceExpired for an old continue token."""
        with (
            self._get(kind, query, read_timeout=self._timing.answer_timeout) as response,
            _as_cluster_errors(),
        ):
            return response.read()

    @contextmanager
    def watch(self, kind: Kind, query: dict[str, str]) -> Iterator[Iterator[bytes]]:
        """The lines of a watch, until it ends or its connection breaks or falls silent.

        Raises ClusterError, or ResourceExpired if the history does not reach back so far.
        """
        seconds = self._timing.watch_seconds()
        query = query | {"watch": "true", "timeoutSeconds": str(seconds)}
        with self._get(kind, query, read_timeout=seconds + self._timing.watch_grace) as response:
            yield self._lines(response)

    def create(self, path: str, body: bytes) -> None:
        """Creates an object (JSON). Raises ClusterError, or RequestRejected if it is invalid."""
        with _as_cluster_errors():
            response = self._request(
                "POST",
                path,
                body=body,
                timeout=Timeout(connect=CONNECT_TIMEOUT, read=self._timing.answer_timeout),
            )
        if response.status // 100 != 2:
            raise error_from_write(response.data, response.status)

    def close(self) -> None:
        """Ends every answer that is being read: the reading thread sees a broken connection."""
        with self._lock:
            self._closed = True
            for response in self._open:
                _shut_down(response)

    def _lines(self, response: BaseHTTPResponse) -> Iterator[bytes]:
        try:
            yield from (line for line in response if line.endswith(b"\n"))
        except (HTTPError, OSError) as error:
            log.debug("%s: a watch broke off: %s", self.url, error)

    @contextmanager
    def _get(
        self, kind: Kind, query: dict[str, str], *, read_timeout: float
    ) -> Iterator[BaseHTTPResponse]:
        with _as_cluster_errors():
            response = self._request(
                "GET",
                PATHS[kind],
                fields=query,
                timeout=Timeout(connect=CONNECT_TIMEOUT, read=read_timeout),
                preload_content=False,
            )
        with self._registered(response):
            if response.status != 200:
                with _as_cluster_errors():
                    raise error_from_status(response.read(), response.status)
            yield response

    def _request(self, method: str, path: str, **how: Any) -> BaseHTTPResponse:
        """Tries again if the token is refused and the kubeconfig's file has another by now."""
        refused = self._headers()
        response = self._send(method, path, headers=refused, **how)
        if response.status == UNAUTHORIZED:
            self._configure()
            if (headers := self._headers()) != refused:
                response.close()
                return self._send(method, path, headers=headers, **how)
        return response

    def _send(self, method: str, path: str, **how: Any) -> BaseHTTPResponse:
        began, code = time.monotonic(), None
        try:
            response = self._pool.request(method, self.url + path, retries=False, **how)
            code = response.status
            return response
        finally:
            self._observe(method, self.url, code, time.monotonic() - began)

    def _configure(self) -> None:
        """Reads the kubeconfig and the files that it names. Raises ClusterError."""
        self._configuration = _configuration(*self._config_source)
        self._pool: PoolManager = RESTClientObject(self._configuration).pool_manager

    def _headers(self) -> dict[str, str]:
        """For each request anew: the client renews a token of a pod or a credential plugin."""
        settings: Any = self._configuration.auth_settings()
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        return headers | {each["key"]: each["value"] for each in settings.values() if each["value"]}

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
                self._open.discard(response)
                response.close()


def _configuration(kubeconfig: Path | None, master: str) -> Configuration:
    configuration = Configuration()
    load: Any = config.load_incluster_config
    if kubeconfig is not None:
        load = partial(config.load_kube_config, str(kubeconfig))
    try:
        if kubeconfig or not master:
            load(client_configuration=configuration)
    except Exception as error:  # the loader does not translate the errors that it meets
        raise ClusterError(f"{kubeconfig or 'no kubeconfig, nor in a pod'}: {error}") from error
    configuration.host = master.rstrip("/") or configuration.host
    configuration.socket_options = KEEPALIVE
    return configuration


def _shut_down(response: BaseHTTPResponse) -> None:
    """shutdown(2), not close(2): it wakes a thread that is reading."""
    with suppress(ValueError, RuntimeError, OSError):
        response.shutdown()


@contextmanager
def _as_cluster_errors() -> Iterator[None]:
    """Errors of the libraries become ClusterError; a credential plugin may raise any of them."""
    try:
        yield
    except ClusterError:
        raise
    except (HTTPError, OSError, ValueError, config.ConfigException) as error:
        raise ClusterError(str(error)) from error
